"""The tests that every operator passes. The test of an operator derives a class from :class:`OperatorTests`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import shoestring
from operator_cases import Arguments, Operator, label
from rounding import assert_no_worse


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


def tensors_of(given: Arguments) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def transposed(t: Tensor) -> Tensor:
    """Return a tensor of equal elements, whose first dimensions are the last ones in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def spread_out(t: Tensor) -> Tensor:
    """Return a tensor of equal elements with gaps between them: every second element of its last dimension."""
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() > 0 else t


class OperatorTests:
    operator: Operator

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        operator = self.operator
        for name, values in (
            ("options", operator.options),
            ("dtype", operator.dtypes),
            ("size", operator.sizes),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=label)

    def test_no_worse_than_eager(
        self, capability: str, size: tuple[int, int], dtype: torch.dtype, options: Arguments, seed: int
    ) -> None:
        case = self.operator.case(*size, dtype, options)
        given, reference = case.given(seed), self.operator.reference

        def exact() -> dict[str, Tensor]:
            return case.results(reference, given, seed, torch.float64)

        ours, eager = (case.results(function, given, seed) for function in (self.operator.call, reference))
        kinds = [{name: (t.shape, t.dtype) for name, t in results.items()} for results in (ours, eager)]
        assert kinds[0] == kinds[1]
        parts = (list(results.values()) for results in (ours, eager, exact()))
        bound = (self.operator.factor, self.operator.slack)
        assert_no_worse(list(ours), *parts, lambda: list(exact().values()), *bound)

    def test_gradcheck(self, options: Arguments, seed: int) -> None:
        given = self.operator.case(3, 5, torch.float64, options).given(seed)
        names = [name for name, t in tensors_of(given).items() if t.requires_grad]

        def call(*leaves: Tensor) -> Any:
            return self.operator.call(**given | dict(zip(names, leaves, strict=True)))

        assert torch.autograd.gradcheck(call, [given[name] for name in names])

    def test_opcheck(self, options: Arguments, seed: int) -> None:
        given, overload = self.operator.case(4, 70, options=options).given(seed), self.operator.call.default
        args = [a for a in overload._schema.arguments if not a.kwarg_only]
        positional = tuple(given.pop(a.name, a.default_value) for a in args)
        torch.library.opcheck(overload, positional, given)

    def test_compiles_whole_with_dynamic_shapes(self, options: Arguments, seed: int) -> None:
        def call(**given: Any) -> Any:
            # A factor of 2 is exact, and makes the operator's results and upstream gradients part of the graph.
            return tree_map(lambda result: result * 2, self.operator.call(**given))

        torch._dynamo.reset()  # all operators share the code of `call`, and few versions of a code are kept
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 2):
            case = self.operator.case(rows, 40, options=options)
            given = case.given(seed)
            assert equal(case.results(compiled, given, seed), case.results(call, given, seed))

    @pytest.mark.parametrize("arranged", [transposed, spread_out])
    def test_strides_change_no_bit(self, arranged: Callable[[Tensor], Tensor], seed: int) -> None:
        case = self.operator.case(9, 77)
        given = case.given(seed)
        others = {
            name: arranged(t.detach()).requires_grad_(t.requires_grad)
            for name, t in tensors_of(given).items()
        }
        assert equal(
            case.results(self.operator.call, given | others, seed),
            case.results(self.operator.call, given, seed),
        )

    def test_autocast_changes_no_bit(self, seed: int) -> None:
        case = self.operator.case(9, 77)
        given = case.given(seed)
        plain = case.results(self.operator.call, given, seed)
        with torch.autocast(plain["result 0"].device.type, torch.bfloat16):
            assert equal(case.results(self.operator.call, given, seed), plain)

    def test_backward_is_not_differentiable(self, seed: int) -> None:
        given = self.operator.case(3, 5).given(seed)
        leaf = next(t for t in tensors_of(given).values() if t.requires_grad)
        made = self.operator.call(**given)
        first = made if isinstance(made, Tensor) else made[0]
        with pytest.raises(RuntimeError, match=": the backward pass is not differentiable") as caught:
            torch.autograd.grad(first.square().sum(), leaf, create_graph=True)[0].sum().backward()
        # Operators that share code share its errors: those of add_rms_norm begin with "rms_norm: ".
        assert self.operator.name.endswith(str(caught.value).partition(":")[0])

    def test_python_function_returns_the_bits_of_the_operator(self, seed: int) -> None:
        case = self.operator.case(5, 77)
        given = case.given(seed)
        function = getattr(shoestring.ops, self.operator.name)
        assert equal(case.results(function, given, seed), case.results(self.operator.call, given, seed))

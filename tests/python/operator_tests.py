"""The tests that every operator passes. The test of an operator derives a class from :class:`OperatorTests`."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

import shoestring
from operator_cases import Arguments, Case, Operator, label
from rounding import assert_no_worse
from thread_counts import assert_same_bits

FLOAT8 = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith("float8_")]


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


def call_of_leaves(case: Case, seed: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function of the tensors of a case that require gradients, and these tensors.

    The function leaves out results that are integers, which have no derivative.
    """
    given = case.given(seed)
    names = [name for name, t in tensors_of(given).items() if t.requires_grad]

    def call(*leaves: Tensor) -> Any:
        results = case.operator.call(**given | dict(zip(names, leaves, strict=True)))
        return tuple(t for t in tree_iter(results) if t.is_floating_point())

    return call, [given[name] for name in names]


class OperatorTests:
    operator: Operator

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        operator = self.operator
        # Tracing takes seconds, so the first tier traces with the first options alone.
        rest = [
            pytest.param(options, marks=pytest.mark.slow) for options in operator.options[1 : operator.traced]
        ]
        for name, values in (
            ("options", operator.options),
            ("traced", [operator.options[0], *rest]),
            ("dtype", operator.dtypes),
            ("size", operator.sizes),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=label)

    def test_no_worse_than_eager(
        self, capability: str, size: tuple[int, int], dtype: torch.dtype, options: Arguments, seed: int
    ) -> None:
        case = self.operator.case(*size, dtype, options)
        given = case.given(seed)

        def exact() -> list[Tensor]:
            return list(case.exact(given, seed).values())

        ours, eager = (
            case.results(function, given, seed) for function in (self.operator.call, self.operator.reference)
        )
        kinds = [{name: (t.shape, t.dtype) for name, t in results.items()} for results in (ours, eager)]
        assert kinds[0] == kinds[1]
        parts = (list(results.values()) for results in (ours, eager))
        computed = self.operator.computed(case.narrow)
        assert_no_worse(list(ours), *parts, exact(), exact, self.operator.factor, case.slack, computed)

    @pytest.mark.sample(simt=5)
    def test_gradcheck(self, backend: str, options: Arguments, seed: int) -> None:
        case = self.operator.case(3, 5, torch.float64, options)
        # Emulated kernels take too long to vary each element, so all vary at once.
        assert torch.autograd.gradcheck(*call_of_leaves(case, seed), fast_mode=backend == "simt")

    @pytest.mark.sample(simt=5)
    def test_second_derivative(self, options: Arguments, seed: int) -> None:
        """The second derivative is right, or an error refuses it."""
        call, leaves = call_of_leaves(self.operator.case(3, 5, torch.float64, options), seed)
        if self.operator.twice_differentiable:
            assert torch.autograd.gradgradcheck(call, leaves)
            return
        first = next(tree_iter(call(*leaves)))
        with pytest.raises(RuntimeError, match=": the backward pass is not differentiable") as caught:
            torch.autograd.grad(first.square().sum(), leaves[0], create_graph=True)[0].sum().backward()
        # Operators that share code share its errors: those of add_rms_norm begin with "rms_norm: ".
        assert str(caught.value).partition(":")[0] in self.operator.name

    def test_opcheck(self, traced: Arguments, seed: int) -> None:
        overload = getattr(torch.ops.shoestring, self.operator.name).default
        given = self.operator.schema(**self.operator.case(4, 70, options=traced).given(seed))
        args = [a for a in overload._schema.arguments if not a.kwarg_only]
        positional = tuple(given.pop(a.name, a.default_value) for a in args)
        # One of opcheck's tests adds up all results in the dtype of the first one, which may be int64. The test below
        # compiles the same operator.
        first = next(tree_iter(overload(*positional, **given)))
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(
            overload, positional, given, test_utils=tests if first.is_floating_point() else tests[:-1]
        )

    def test_compiles_whole_with_dynamic_shapes(self, traced: Arguments, seed: int) -> None:
        def call(**given: Any) -> Any:
            # A factor of 2 is exact, and makes the operator's results and upstream gradients part of the graph.
            return tree_map(lambda result: result * 2, self.operator.call(**given))

        torch._dynamo.reset()  # all operators share the code of `call`, and few versions of a code are kept
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 2):
            case = self.operator.case(rows, 40, options=traced)
            given = case.given(seed)
            assert equal(case.results(compiled, given, seed), case.results(call, given, seed))

    @pytest.mark.parametrize("arranged", [transposed, spread_out])
    def test_strides_change_no_bit(
        self, backend: str, arranged: Callable[[Tensor], Tensor], seed: int
    ) -> None:
        case = self.operator.case(9, 77)
        given = case.given(seed)
        others = {
            name: arranged(t.detach()).requires_grad_(t.requires_grad)
            for name, t in tensors_of(given).items()
        }
        ours, expected = (case.results(self.operator.call, g, seed) for g in (given | others, given))
        if backend == "cuda" and self.operator.autocast:  # cuBLAS chooses its kernels by the strides
            torch.testing.assert_close(ours, expected)
        else:
            assert equal(ours, expected)

    def test_autocast(self, seed: int) -> None:
        """Under autocast, the operator casts its arguments to bf16, or changes no bit. Gradients may be more exact."""
        case, change = self.operator.case(9, 77), self.operator.autocast or dict
        given = case.given(seed)
        expected = case.results(lambda **given: self.operator.call(**change(given)), given, seed)
        with torch.autocast(expected["result 0"].device.type, torch.bfloat16):
            ours = case.results(self.operator.call, given, seed)
        assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in expected.items()}
        if self.operator.autocast:
            ours, expected = (
                {name: t.bfloat16() if "gradient" in name else t for name, t in results.items()}
                for results in (ours, expected)
            )
        assert equal(ours, expected)

    @pytest.mark.parametrize("rows", [256, 4096])
    @pytest.mark.sample(simt=1)
    def test_bits_do_not_depend_on_the_number_of_threads(self, backend: str, rows: int, seed: int) -> None:
        """A small input stays on one thread, a large one is divided among up to 64. On a GPU, calls are repeated."""
        case = self.operator.case(*(rows // 32, 64) if backend == "simt" else (rows, 256))
        given = case.given(seed)

        def run() -> list[Tensor]:
            return list(case.results(self.operator.call, given, seed).values())

        assert_same_bits(run, (1, 2, 3, 7, 16, 64) if backend == "cpu" else (1, 2))

    def test_python_function_returns_the_bits_of_the_operator(self, seed: int) -> None:
        case = self.operator.case(5, 77)
        given = case.given(seed)

        def of_ops(**given: Any) -> Any:
            return getattr(shoestring.ops, self.operator.name)(**self.operator.schema(**given))

        function = self.operator.function or of_ops
        assert equal(case.results(function, given, seed), case.results(self.operator.call, given, seed))

    @pytest.mark.parametrize("float8", FLOAT8, ids=label)
    def test_8_bit_floats_are_refused(self, float8: torch.dtype, seed: int) -> None:
        """Elements of 8 bits are smaller than those that any kernel reads."""
        given = self.operator.case(8, 64).given(seed)
        floats = [name for name, t in tensors_of(given).items() if t.is_floating_point()]
        for names in (floats, *([name] for name in floats)):
            wrong = {name: torch.ones_like(given[name]).detach().to(float8) for name in names}
            with pytest.raises((RuntimeError, TypeError), match="(?i)float8"):
                self.operator.call(**given | wrong)

    @pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")], ids="-".join)
    def test_tensors_on_different_devices_are_refused(self, devices: tuple[str, str], seed: int) -> None:
        """An error of one line names the operator, an argument and both devices."""
        case = self.operator.case(3, 16)
        here, there = (case.given(seed, device) for device in devices)
        tensors = tensors_of(there)
        for name, moved in tensors.items() if len(tensors) > 1 else ():
            with pytest.raises(RuntimeError, match=r"^\w+: [\w, ]+: expected .* received ") as caught:
                self.operator.call(**here | {name: moved})
            message = str(caught.value).splitlines()[0]
            operator, names, _ = message.split(": ", 2)
            # Some operators call the one of a group.
            assert operator in self.operator.name or self.operator.name in operator, message
            assert {*re.split(", | and ", names)} <= {*tensors}, message
            assert all(device in message for device in devices), message

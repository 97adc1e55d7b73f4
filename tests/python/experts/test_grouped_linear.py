"""Test grouped_linear: the rows of each expert times its own weight."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import Arguments, Draw, Operator, integers, normal
from operator_tests import OperatorTests
from references.experts import grouped_linear_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

EXPERTS = 5
BF16 = {"dtype": torch.bfloat16}
# One row, odd sizes, no rows, and rows and columns of several tiles and panels.
SIZES = [(1, 40), (51, 65), (0, 8), (130, 300)]
# Numbers of out_features by numbers of in_features.
OUTPUTS = {40: 33, 65: 31, 8: 4, 300: 290}


def slack(elements: int, dtype: torch.dtype) -> float:
    """Allow more on a GPU, whose products may be rounded to 16 bits before they are added."""
    split = torch.get_default_device().type == "cuda" and dtype.itemsize == 2
    return 1e-7 + split * torch.finfo(dtype).eps / 4


def offsets_of(slots: int, kind: str) -> Draw:
    """Draw the offsets of experts. Expert 1 has no slot.

    Of "part", some slots at both ends have no expert. Of "all", each slot has one. Of "one", expert 3 has each slot.
    """

    def values(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        cuts = torch.randint(0, slots + 1, shape, generator=g, device="cpu").sort().values
        if kind == "part":
            cuts = cuts.clamp(min(1, slots), max(slots - 1, min(1, slots)))
        else:
            cuts[0], cuts[-1] = 0, slots
        cuts[2] = cuts[1]
        if kind == "one":
            cuts[:4], cuts[4:] = 0, slots
        return cuts

    return Draw((EXPERTS + 1,), values)


def arguments(tokens: int, features: int) -> Arguments:
    """Return arguments with two slots for each token: some tokens have several, and others none."""
    out = OUTPUTS.get(features, features // 2 + 3)
    return {
        "x": normal(tokens, features),
        "weight": normal(EXPERTS, out, features),
        "offsets": offsets_of(2 * tokens, "part"),
        "rows": integers(2 * tokens, high=max(1, tokens)),
        "bias": normal(EXPERTS, out),
    }


def without_rows(kind: str) -> Arguments:
    return {"rows": None, "offsets": lambda tokens, _: offsets_of(tokens, kind)}


@pytest.mark.sample(cpu=60, simt=8)
class TestGroupedLinear(OperatorTests):
    operator = Operator(
        "grouped_linear",
        grouped_linear_reference,
        arguments,
        SIZES,
        [
            {},
            BF16 | {"bias": None},
            BF16 | without_rows("part"),
            {"bias": None} | without_rows("all"),
            {"offsets": lambda tokens, _: offsets_of(2 * tokens, "one")},
            BF16 | without_rows("one"),
        ],
        slack=slack,
        autocast=lambda given: given | BF16,
        traced=3,
    )


def results(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    upstream: Tensor | None = None,
    function: Callable[..., Tensor] = shoestring.grouped_linear,
    **options: Any,
) -> list[Tensor]:
    """Return the result of grouped_linear and the gradients of x, the weight, and the bias if it is given."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = function(leaves[0], leaves[1], offsets, bias=leaves[2] if bias is not None else None, **options)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y) if upstream is None else upstream
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN. The emulator does so always."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("refers", [False, True], ids=["", "rows"])
def test_nothing_is_left_unwritten(capability: str, poisoned: None, refers: bool, dtype: torch.dtype) -> None:
    """The results of slots and tokens that nobody multiplies are zeros, and so are gradients of unused experts."""
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((7, 20), (4, 9, 20), (4, 9)))
    offsets = torch.tensor([2, 2, 4, 4, 5])
    rows = torch.tensor([6, 6, 1, 3, 1, 0, 0]) if refers else None
    y, grad_x, grad_weight, grad_bias = results(x, weight, offsets, rows=rows, bias=bias)
    for t in (y, grad_x, grad_weight, grad_bias):
        assert t.dtype == dtype and bool(t.isfinite().all())
    assert y.ne(0).any(-1).tolist() == [False, False, True, True, True, False, False]
    used = (1, 3) if refers else (2, 3, 4)
    assert grad_x.ne(0).any(-1).tolist() == [i in used for i in range(7)]
    for t in (grad_weight.flatten(1), grad_bias):
        assert t.ne(0).any(-1).tolist() == [False, True, False, True]
    assert grad_weight.ne(0).any(1).equal(grad_bias.ne(0).any(-1, keepdim=True).expand(4, 20))


@pytest.mark.parametrize("refers", [False, True], ids=["", "rows"])
def test_empty_dimensions(poisoned: None, refers: bool) -> None:
    """No features, no outputs, no experts, no slots or no tokens: the result is the bias, zeros or empty."""
    for tokens, features, out, experts in itertools.product((0, 3), (0, 4), (0, 5), (0, 2)):
        x, weight = torch.randn(tokens, features), torch.randn(experts, out, features)
        bias, rows = torch.randn(experts, out), torch.arange(tokens).flip(0) if refers else None
        offsets = torch.tensor([0, tokens // 2, tokens][: experts + 1])
        ours = results(x, weight, offsets, rows=rows, bias=bias)
        expected = [torch.zeros(tokens, out), *map(torch.zeros_like, (x, weight, bias))]
        if experts > 0:
            expected = results(x, weight, offsets, rows=rows, bias=bias, function=grouped_linear_reference)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_have_the_bits_of_many(capability: str, dtype: torch.dtype) -> None:
    """The result and the gradient of a row do not depend on the number of rows of its expert."""
    x, weight, grad = (torch.randn(s).to(dtype) for s in ((31, 410), (1, 70, 410), (31, 70)))
    y, grad_x, _ = results(x, weight, torch.tensor([0, 31]), upstream=grad)
    for rows in range(1, 31):
        found = results(x[:rows], weight, torch.tensor([0, rows]), upstream=grad[:rows])
        assert torch.equal(found[0], y[:rows]) and torch.equal(found[1], grad_x[:rows])


def test_not_finite_stays_with_its_slots(capability: str) -> None:
    """A NaN reaches the slots and the expert that read it, and nothing else, in the result and the gradients."""
    tokens, rows = 6, torch.tensor([5, 0, 1, 2, 3, 2, 1, 4, 0])
    offsets = torch.tensor([1, 3, 3, 6, 8])
    x, weight = torch.randn(tokens, 33), torch.randn(4, 17, 33)
    finite = torch.ones(9, 17)

    def broken(**changed: Tensor) -> list[list[int]]:
        """Return the rows of y and of grad x, and the experts of grad weight, that have a NaN."""
        given = {"x": x, "weight": weight, "upstream": finite} | changed
        found = results(
            given.pop("x"), given.pop("weight"), offsets, rows=rows, bias=torch.ones(4, 17), **given
        )
        return [t.flatten(1).isnan().any(-1).nonzero().flatten().tolist() for t in found]

    def with_nan(t: Tensor, *place: int) -> Tensor:
        t = t.clone()
        t[place] = torch.nan
        return t

    assert broken() == [[], [], [], []]
    assert broken(x=with_nan(x, 2, 30)) == [[3, 5], [], [2], []]
    assert broken(x=with_nan(x, 5, 0)) == [[], [], [], []]  # only a slot without expert reads row 5
    assert broken(weight=with_nan(weight, 3, 16, 32)) == [[6, 7], [1, 4], [], []]
    assert broken(weight=with_nan(weight, 1, 0, 0)) == [[], [], [], []]
    assert broken(upstream=with_nan(finite, 4, 3)) == [[], [3], [2], [2]]
    for slot in (0, 8):  # without an expert
        assert broken(upstream=with_nan(finite, slot, 3)) == [[], [], [], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_do_not_change_each_other(capability: str, dtype: torch.dtype) -> None:
    """The results of an expert have the same bits if the others have no slots."""
    x, weight = torch.randn(50, 65).to(dtype), torch.randn(4, 40, 65).to(dtype)
    offsets, rows = torch.tensor([2, 7, 8, 70, 88]), torch.randint(50, (90,))
    y, _, grad_weight = results(x, weight, offsets, rows=rows)
    for e in range(4):
        first, last = offsets[e : e + 2].tolist()
        alone = torch.tensor([first] * (e + 1) + [last] * (4 - e))
        part, _, grad_part = results(x, weight, alone, rows=rows)
        assert torch.equal(part[first:last], y[first:last]) and torch.equal(grad_part[e], grad_weight[e])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("refers", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("most", [0.98, 0.3], ids=["one has most", "even"])
def test_bits_do_not_depend_on_the_number_of_threads(
    backend: str, most: float, refers: bool, dtype: torch.dtype
) -> None:
    """The product of an expert is divided among threads by rows or by columns, with the same bits.

    An expert has more rows than backward adds at a time.
    """
    slots, features, out = (40, 33, 48) if backend == "simt" else (900, 130, 1100)
    tokens = slots // 2 if refers else slots
    x, weight = torch.randn(tokens, features).to(dtype), (torch.randn(4, out, features) / 8).to(dtype)
    rows = torch.randint(tokens, (slots,)) if refers else None
    ends = torch.tensor([0.01, 0.01, 0.01 + most, 1.0]).mul(slots).long().clamp(max=slots)
    offsets = torch.cat([torch.ones(1, dtype=torch.int64), ends.clamp(min=1)])
    counts = (1, 2, 3, 7, 16, 64) if backend == "cpu" else (1, 2)
    for w, a in ((weight, x), (weight.mT.contiguous(), torch.randn(tokens, out).to(dtype))):

        def run(
            function: Callable[..., Tensor], w: Tensor = w, a: Tensor = a, dtype: torch.dtype = dtype
        ) -> list[Tensor]:
            w, a = w.to(dtype), a.to(dtype)
            return results(a, w, offsets, rows=rows, bias=w[:, :, 0], function=function)

        ours = assert_same_bits(lambda run=run: run(shoestring.grouped_linear), counts)[0]  # type: ignore[misc]
        for t, exact in zip(ours, run(grouped_linear_reference, dtype=torch.float64), strict=True):
            assert relative_error(t, exact) <= 1e-5 + 4 * torch.finfo(dtype).eps


STACK = (3, 21, 33)
# x (6, 33) and the weights, as views of any strides.
VIEWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "rows": lambda: (torch.randn(12, 50)[::2, 3:36], torch.randn(STACK)),
    "columns": lambda: (torch.randn(33, 6).t(), torch.randn(STACK)),
    "one row": lambda: (torch.randn(33).expand(6, 33), torch.randn(STACK)),
    "every second column": lambda: (torch.randn(6, 66)[:, ::2], torch.randn(STACK)),
    "transposed weights": lambda: (torch.randn(6, 33), torch.randn(3, 33, 21).mT),
    "weights side by side": lambda: (torch.randn(6, 33), torch.randn(21, 3, 33).transpose(0, 1)),
    "one weight": lambda: (torch.randn(6, 33), torch.randn(21, 33).expand(STACK)),
    "parts of weights": lambda: (torch.randn(6, 33), torch.randn(6, 40, 40)[::2, :21, 7:]),
}


@pytest.mark.parametrize("refers", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_strides(backend: str, view: str, dtype: torch.dtype, refers: bool) -> None:
    """Arguments of any strides give the bits of contiguous ones."""

    def copied(t: Tensor) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    x, weight = (t.to(dtype) for t in VIEWS[view]())
    rows = torch.tensor([0, 5, 1, 1, 3, 2, 2, 4, 0]) if refers else None
    offsets = torch.tensor([0, 4, 4, 9] if refers else [0, 4, 4, 5])
    bias, upstream = torch.randn(21, 3, dtype=dtype).t(), torch.randn(21, 9 if refers else 6, dtype=dtype).t()
    expected = results(
        *map(copied, (x, weight)), offsets, rows=rows, bias=copied(bias), upstream=copied(upstream)
    )
    strided = torch.stack([offsets, offsets], -1)[:, 0]
    indices = None if rows is None else torch.stack([rows, rows], -1)[:, 0]
    ours = results(x, weight, strided, rows=indices, bias=bias, upstream=upstream)
    for a, b in zip(ours, expected, strict=True):
        if backend == "cuda":  # cuBLAS chooses its kernels by the strides
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b)


def test_an_expanded_gradient() -> None:
    """The gradient of a sum, a number that is expanded to the result, is read like any other."""
    leaves = [torch.randn(s, requires_grad=True) for s in ((6, 33), (3, 21, 33), (3, 21))]
    offsets, rows = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 5, 1, 1, 3, 2, 2, 4, 0])
    ours, expected = (
        torch.autograd.grad(f(*leaves[:2], offsets, rows=rows, bias=leaves[2]).sum(), leaves)
        for f in (shoestring.grouped_linear, grouped_linear_reference)
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("refers", [False, True], ids=["", "rows"])
def test_tensors_of_several_dtypes(capability: str, refers: bool, dtype: torch.dtype) -> None:
    """With dtype, x, the weight and the bias may have any dtypes, and their gradients have the same."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    rows, offsets = torch.tensor([2, 0, 3, 3, 1]) if refers else None, torch.tensor([0, 2, 2, 5])
    for x_type, weight_type, bias_type in itertools.product(kinds, repeat=3):
        given = [torch.randn(5, 12), torch.randn(3, 9, 12), torch.randn(3, 9)]
        x, weight, bias = (
            t.to(kind) for t, kind in zip(given, (x_type, weight_type, bias_type), strict=True)
        )
        found = results(x, weight, offsets, rows=rows, bias=bias, dtype=dtype)
        expected = results(
            x.to(dtype).double(),
            weight.to(dtype).double(),
            offsets,
            rows=rows,
            bias=bias.double(),
            upstream=torch.linspace(-1, 1, 45).view(5, 9).to(dtype).double(),
            function=grouped_linear_reference,
        )
        assert [t.dtype for t in found] == [dtype, x_type, weight_type, bias_type]
        for ours, exact, kind in zip(found, expected, (dtype, x_type, weight_type, bias_type), strict=True):
            # Products of fp32 on a GPU follow torch.backends.cuda.matmul, and a GPU may round the bias.
            least = max(torch.finfo(t).eps for t in (torch.float32, dtype, kind))
            torch.testing.assert_close(ours.double(), exact, rtol=4 * least, atol=8 * least)


def test_subsets_of_gradients() -> None:
    """Each gradient has the same bits whichever others are wanted. x is saved only for that of the weight."""
    tensors = [torch.randn(s) for s in ((40, 24), (4, 16, 24), (4, 16))]
    offsets, rows = torch.tensor([0, 20, 20, 33, 60]), torch.randint(40, (60,))

    def gradients(wanted: tuple[int, ...]) -> tuple[dict[int, Tensor], list[Tensor]]:
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = shoestring.grouped_linear(*leaves[:2], offsets, rows=rows, bias=leaves[2])
        upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
        found = torch.autograd.grad(y, [leaves[i] for i in wanted], upstream)
        return dict(zip(wanted, found, strict=True)), saved

    every = gradients((0, 1, 2))[0]
    for wanted in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        found, saved = gradients(wanted)
        assert all(torch.equal(t, every[i]) for i, t in found.items())
        assert any(t.data_ptr() == tensors[0].data_ptr() for t in saved) == (1 in wanted)
    assert not shoestring.grouped_linear(*tensors[:2], offsets, rows=rows).requires_grad


def test_saves_x_rounded_and_no_rounded_weight() -> None:
    x, weight = torch.randn(40, 24, requires_grad=True), torch.randn(2, 8, 24, requires_grad=True)
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast(x.device.type, torch.bfloat16),
    ):
        y = shoestring.grouped_linear(x, weight, torch.tensor([0, 30, 40]))
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in saved if t.is_floating_point()] == [torch.bfloat16, torch.float32]
    assert any(t.data_ptr() == weight.data_ptr() for t in saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_second_derivative_is_refused_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """The gradients have their values also where autograd records backward, which runs in several threads."""
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((600, 130), (4, 300, 130), (4, 300))]
    offsets, rows = torch.tensor([0, 500, 500, 580, 600]), torch.randint(600, (600,))
    y = shoestring.grouped_linear(*leaves[:2], offsets, rows=rows, bias=leaves[2])
    upstream = torch.randn_like(y).requires_grad_()
    plain = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    recorded = torch.autograd.grad(y, leaves, upstream, create_graph=True)
    for a, b in zip(plain, recorded, strict=True):
        assert torch.equal(a, b)
        with pytest.raises(RuntimeError, match="grouped_linear: the backward pass is not differentiable"):
            b.sum().backward(retain_graph=True)


def test_inference_mode() -> None:
    leaves = [torch.randn(s, requires_grad=True) for s in ((600, 130), (4, 300, 130), (4, 300))]
    offsets, rows = torch.tensor([3, 500, 500, 580, 597]), torch.randint(600, (600,))
    expected = shoestring.grouped_linear(*leaves[:2], offsets, rows=rows, bias=leaves[2])
    with torch.inference_mode():
        x, weight, bias = (t.clone() for t in leaves)
        assert torch.equal(shoestring.grouped_linear(x, weight, offsets, rows=rows, bias=bias), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_x_are_not_copied(backend: str, dtype: torch.dtype) -> None:
    """Neither forward nor backward allocates as much as x[rows], the operand of other grouped products."""
    if backend != "cpu":
        pytest.skip("the profiler counts the memory of CPU tensors")
    slots, features, out = 16384, 1024, 16
    x = torch.randn(64, features).to(dtype).requires_grad_()
    weight = torch.randn(8, out, features).to(dtype).requires_grad_()
    offsets, rows = torch.arange(9) * (slots // 8), torch.randint(64, (slots,))

    def largest(run: Callable[[], object]) -> int:
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            run()
        return max(event.cpu_memory_usage for event in profile.events())

    def step() -> None:
        y = shoestring.grouped_linear(x, weight, offsets, rows=rows)
        torch.autograd.grad(y, (x, weight), y.detach())

    copied = slots * features * dtype.itemsize
    assert largest(lambda: x.detach()[rows]) >= copied
    step()
    # The products keep at most 16 MiB of packed panels.
    assert largest(step) < copied / 2


def experts_loop(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the experts of a model as transformers does by default: a loop over experts, and index_add."""
    y = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, place = (index == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].t()).chunk(2, -1)
        part = (torch.nn.functional.silu(gate) * up) @ down[e].t()
        y = y.index_add(0, token, part * weights[token, place, None])
    return y


def test_experts_of_a_model() -> None:
    """moe_route, moe_sort and grouped_linear compute the experts of a model, with tokens that the mask leaves out."""
    experts, top_k, tokens = 6, 2, 50
    x, router, gate_up, down = leaves = [
        torch.randn(s, requires_grad=True)
        for s in ((tokens, 24), (experts, 24), (experts, 32, 24), (experts, 24, 16))
    ]
    mask = torch.rand(tokens) < 0.8

    def ours() -> Tensor:
        route = shoestring.moe_route(x @ router.t(), top_k, mask=mask)
        order, inverse, offsets = shoestring.moe_sort(route.index, experts)
        gate, up = shoestring.grouped_linear(x, gate_up, offsets, rows=order // top_k).chunk(2, -1)
        y = shoestring.grouped_linear(torch.nn.functional.silu(gate) * up, down, offsets)
        return (y[inverse].view(tokens, top_k, -1) * route.weight.unsqueeze(-1)).sum(1)

    def loop() -> Tensor:
        route = shoestring.moe_route(x @ router.t(), top_k, mask=mask)
        return experts_loop(x, route.index, route.weight, gate_up, down)

    upstream = torch.randn(tokens, 24)
    a, b = ours(), loop()
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not a[~mask].any()
    for p, q in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (a, b)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-3)


X, WEIGHT = (3, 4), (2, 5, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4)}, r"x: expected shape \(tokens, in_features\), received \[4\]"),
        (
            {"x": torch.ones(3, 5)},
            r"weight: expected shape \(experts, out_features, 5\), received \[2, 5, 4\]",
        ),
        (
            {"weight": torch.ones(5, 4)},
            r"weight: expected shape \(experts, out_features, 4\), received \[5, 4\]",
        ),
        ({"bias": torch.ones(5)}, r"bias: expected shape \(2, 5\), received \[5\]"),
        ({"bias": torch.ones(3, 5)}, r"bias: expected shape \(2, 5\), received \[3, 5\]"),
        ({"x": torch.ones(X, dtype=torch.int32)}, "x: expected fp32, fp64, bf16 or fp16, received Int"),
        ({"dtype": torch.int32}, "dtype: expected fp32, fp64, bf16 or fp16, received Int"),
        ({"weight": torch.ones(WEIGHT).bfloat16()}, "weight: expected Float, received BFloat16; pass dtype"),
        ({"bias": torch.ones(2, 5).half()}, "bias: expected Float, received Half; pass dtype"),
        (
            {"weight": torch.ones(WEIGHT, dtype=torch.int32), "dtype": torch.float32},
            "weight: expected fp32, fp64, bf16 or fp16, received Int",
        ),
        ({"offsets": torch.tensor([0, 3])}, "offsets: expected 3 numbers, one more than experts, received 2"),
        ({"offsets": torch.tensor([0, 1, 3]).int()}, "offsets: expected int64 of one dimension .* of Int"),
        ({"offsets": torch.tensor([[0, 1, 3]])}, r"offsets: expected int64 of one dimension .* \[1, 3\]"),
        ({"rows": torch.tensor([0, 1, 2]).int()}, "rows: expected int64 of one dimension .* of Int"),
        ({"rows": torch.tensor([[0, 1, 2]])}, r"rows: expected int64 of one dimension .* \[1, 3\]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.ones(X), "weight": torch.ones(WEIGHT), "offsets": torch.tensor([0, 1, 3])}
    device = given["x"].device
    given |= {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in change.items()
    }
    with pytest.raises(RuntimeError, match="grouped_linear: " + message):
        shoestring.grouped_linear(**given)


@pytest.mark.parametrize(
    ("offsets", "rows", "message"),
    [
        (
            [0, 2, 1],
            None,
            "offsets: expected ascending numbers from 0 to 3, the number of rows of x, received 1 after 2",
        ),
        ([-1, 2, 3], None, "offsets: expected ascending .* received -1 after 0"),
        ([0, 2, 4], None, "offsets: expected ascending .* received 4 after 2"),
        (
            [0, 2, 3],
            [0, 1],
            "offsets: expected ascending numbers from 0 to 2, the number of rows, received 3 after 2",
        ),
        ([0, 1, 2], [0, 3], "rows: expected numbers from 0 to 2, received 3"),
        ([0, 1, 2], [-1, 2], "rows: expected numbers from 0 to 2, received -1"),
    ],
    ids=str,
)
def test_errors_of_slots(backend: str, offsets: list[int], rows: list[int] | None, message: str) -> None:
    if backend != "cpu":
        pytest.skip("an error would wait for the GPU")
    index = None if rows is None else torch.tensor(rows)
    with pytest.raises(RuntimeError, match="grouped_linear: " + message):
        shoestring.grouped_linear(torch.ones(X), torch.ones(WEIGHT), torch.tensor(offsets), rows=index)

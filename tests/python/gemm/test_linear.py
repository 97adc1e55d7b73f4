"""Test linear and linear_group: linear layers with trainable weights."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from references.gemm import linear_reference
from relative_error import relative_error
from rounding import rounding_errors
from shoestring.gemm.linear import PRODUCTS
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Shapes (tokens, in_features, out_features of each layer): one token, odd sizes, no tokens, and sizes of
# several tiles and panels.
SHAPES = [(1, 40, (33, 16)), (51, 65, (31, 7)), (0, 8, (4, 4)), (130, 300, (96, 48))]
LIBRARIES = [(), PRODUCTS]


def compare(
    ours: list[Tensor],
    exact: list[Tensor],
    eager: list[Tensor],
    dtypes: list[torch.dtype],
    slack: float,
    compute: Callable[[], list[Tensor]] | None = None,
) -> None:
    """Compare the errors with those of eager PyTorch, and with errors to expect if ``compute`` is given.

    ``compute`` returns the exact results. It is needed for results of so few elements that eager's roundings
    may cancel.
    """
    for i, (a, b, c, dtype) in enumerate(zip(ours, exact, eager, dtypes, strict=True)):
        assert a.dtype == dtype and a.shape == b.shape
        if not a.numel():
            continue
        # cuBLAS may split the sums of one of two equal products, and add the parts in 16 bits.
        split = torch.finfo(dtype).eps / 4 if a.is_cuda and dtype.itemsize == 2 else 0
        error, bound = relative_error(a, b), 1.1 * relative_error(c, b) + slack + split
        if error > bound and compute is not None:
            bound = rounding_errors(compute, exact, dtype)[i]
        assert error <= bound


@pytest.mark.sample(24, simt=8)
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_worse_than_eager(
    capability: str, shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, library: tuple[str, ...]
) -> None:
    tokens, features, outs = shape
    x = torch.randn(tokens, features).to(dtype)
    weights = [torch.randn(out, features).to(dtype) for out in outs]
    bias, upstream = torch.randn(outs[0]).to(dtype), [torch.randn(tokens, out).to(dtype) for out in outs]

    def compute(in_dtype: torch.dtype, ours: bool) -> list[Tensor]:
        inputs = [t.to(in_dtype).requires_grad_() for t in (x, *weights, bias)]
        y = (
            shoestring.linear_group(inputs[0], inputs[1:3], [inputs[3], None], library=library)
            if ours
            else [F.linear(inputs[0], inputs[1], inputs[3]), F.linear(inputs[0], inputs[2])]
        )
        return [*y, *torch.autograd.grad(y, inputs, [g.to(in_dtype) for g in upstream])]

    results = [compute(dtype, True), compute(torch.float64, False), compute(dtype, False)]
    few = tokens < 8
    exactly = (lambda: compute(torch.float64, False)) if few else None
    compare(*results, dtypes=[dtype] * 6, slack=1e-7, compute=exactly)


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_autocast(capability: str, backend: str, library: tuple[str, ...]) -> None:
    """Under autocast, gradients have the dtypes of x and of the weights, and are no worse than eager's."""
    device = "cuda" if backend == "cuda" else "cpu"
    x, weights = torch.randn(3, 70, 96), [torch.randn(64, 96), torch.randn(40, 96)]
    bias, upstream = torch.randn(64), [torch.randn(3, 70, 64), torch.randn(3, 70, 40)]
    results = []
    for ours, compute in ((True, torch.float32), (False, torch.float64), (False, torch.float32)):
        inputs = [t.to(compute).requires_grad_() for t in (x, *weights, bias)]
        with torch.autocast(device, torch.bfloat16, enabled=compute != torch.float64):
            y = (
                shoestring.linear_group(inputs[0], inputs[1:3], [inputs[3], None], library=library)
                if ours
                else [F.linear(inputs[0], inputs[1], inputs[3]), F.linear(inputs[0], inputs[2])]
            )
        grads = torch.autograd.grad(y, inputs, [g.to(t.dtype) for g, t in zip(upstream, y, strict=True)])
        results.append([*y, *grads])
    compare(*results, dtypes=[torch.bfloat16] * 2 + [torch.float32] * 4, slack=1e-7)


def test_what_is_kept() -> None:
    """x is saved once, rounded to the dtype of the product, and no rounded weight is saved."""
    x, weights = torch.randn(40, 24, requires_grad=True), [torch.randn(8, 24, requires_grad=True)] * 2
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s),
        torch.autocast(x.device.type, torch.bfloat16),
    ):
        shoestring.linear_group(x, weights)
    assert [t.dtype for t in saved] == [torch.bfloat16, torch.float32, torch.float32]
    assert all(t.data_ptr() == weights[0].data_ptr() for t in saved[1:])


@pytest.mark.parametrize("wide", [False, True], ids=["same dtype", "wider"])
def test_residual(capability: str, wide: bool) -> None:
    dtype = torch.bfloat16 if wide else torch.float32
    x, weight, bias, residual = (torch.randn(s) for s in ((2, 9, 33), (17, 33), (17,), (2, 9, 17)))
    inputs = [t.requires_grad_() for t in (x, weight, bias, residual)]
    y = shoestring.linear(x, weight, bias, residual=residual, dtype=dtype)
    expected = linear_reference(x, weight, bias, residual=residual, dtype=dtype)
    assert y.dtype == torch.float32
    upstream = torch.randn_like(y)
    for ours, eager in zip(
        [y, *torch.autograd.grad(y, inputs, upstream)],
        [expected, *torch.autograd.grad(expected, inputs, upstream)],
        strict=True,
    ):
        assert ours.dtype == eager.dtype
        assert relative_error(ours, eager.double()) <= (1e-2 if wide else 1e-5)


def test_subsets_of_gradients() -> None:
    """Each gradient has the same bits whichever other gradients are wanted.

    A layer whose output is not used gets no gradient.
    """
    tensors = [torch.randn(s) for s in ((40, 24), (16, 24), (8, 24), (16,))]

    def gradients(wanted: tuple[int, ...], used: tuple[int, ...]) -> dict[int, Tensor | None]:
        inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y = shoestring.linear_group(inputs[0], inputs[1:3], [inputs[3], None])
        loss = torch.cat([y[i].detach().mul(y[i]).flatten() for i in used]).sum()
        found = torch.autograd.grad(loss, [inputs[i] for i in wanted], allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    every = gradients((0, 1, 2, 3), (0, 1))
    for wanted in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in (1, 2, 3)):
        for i, found in gradients(wanted, (0, 1)).items():
            assert found is not None and torch.equal(found, every[i])  # type: ignore[arg-type]
    for used, missing in ((0, [2]), (1, [1, 3])):
        assert [i for i, g in gradients((0, 1, 2, 3), (used,)).items() if g is None] == missing


def test_views_and_strides(capability: str) -> None:
    x = torch.randn(12, 5, 40)[::2, :, 3:36].transpose(0, 1)
    weight = torch.randn(33, 31).t()
    torch.testing.assert_close(shoestring.linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    vector = torch.randn(33)
    torch.testing.assert_close(
        shoestring.linear(vector, weight), F.linear(vector, weight), rtol=1e-5, atol=1e-5
    )


def test_not_finite_stays_in_its_row(capability: str) -> None:
    x, weight = torch.randn(20, 40), torch.randn(16, 40)
    x[3, 5], x[7, 1] = float("nan"), 1e30
    y = shoestring.linear(x, weight)
    assert bool(y[3].isnan().all()) and bool(torch.cat([y[:3], y[4:]]).isfinite().all())


def test_gradcheck_and_opcheck() -> None:
    x, q, k, bias, residual = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 8), (6, 8), (5, 8), (6,), (2, 3, 6))
    )  # fmt: skip
    alone = lambda x, w, b, r: shoestring.linear(x, w, b, residual=r)  # noqa: E731
    group = lambda x, q, k, b: shoestring.linear_group(x, [q, k], [b, None])  # noqa: E731
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(alone, (x, q, bias, residual))
        assert check(group, (x, q, k, bias))
    x, q, bias = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True), torch.randn(6)
    torch.library.opcheck(torch.ops.shoestring.linear.default, (x, q, bias))
    torch.library.opcheck(torch.ops.shoestring.linear.default, (x, q), {"dtype": torch.bfloat16})
    torch.library.opcheck(torch.ops.shoestring.linear_group.default, (x, [q, q], [bias, None]))


def test_double_backward_under_autocast() -> None:
    results = []
    for function in (shoestring.linear, F.linear):
        torch.manual_seed(0)
        x, weight = torch.randn(9, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
        grads = torch.autograd.grad(y.float().square().sum(), (x, weight), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight)))
    for ours, eager in zip(*results, strict=True):
        assert relative_error(ours, eager.double()) <= 2e-2


def test_compiles() -> None:
    def loss(x: Tensor, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        a, b = shoestring.linear_group(x, [q, k], [bias, None])
        return (a * a).sum() + shoestring.linear(b, k, residual=x[..., : k.shape[0]]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for autocast, tokens in itertools.product((False, True), (5, 9)):
        inputs = [torch.randn(s, requires_grad=True) for s in ((tokens, 8), (6, 8), (8, 8), (6,))]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            a = torch.autograd.grad(compiled(*inputs), inputs)
            b = torch.autograd.grad(loss(*inputs), inputs)
        for ours, expected in zip(a, b, strict=True):
            torch.testing.assert_close(
                ours, expected, rtol=2e-2 if autocast else 1e-5, atol=1e-1 if autocast else 1e-5
            )


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_threads_change_nothing(capability: str, backend: str, autocast: bool) -> None:
    if backend != "cpu" or capability == "plain":
        pytest.skip("the library's products")
    x, weights = (
        torch.randn(700, 130, requires_grad=True),
        [torch.randn(n, 130, requires_grad=True) for n in (90, 33)],
    )

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = shoestring.linear_group(x, weights)
        return [*y, *torch.autograd.grad(y, (x, *weights), [torch.ones_like(t) for t in y])]

    assert_same_bits(run, (1, 2, 3))


def test_module() -> None:
    torch.manual_seed(0)
    ours = shoestring.nn.Linear(24, 8, library=("forward",))
    torch.manual_seed(0)
    theirs = torch.nn.Linear(24, 8)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    x, residual = torch.randn(2, 5, 24), torch.randn(2, 5, 8)
    torch.testing.assert_close(copy.deepcopy(ours)(x, residual), theirs(x) + residual)
    assert "library=('forward',)" in repr(ours)
    with pytest.raises(ValueError, match="library: expected names out of forward, grad_x, grad_weight"):
        shoestring.nn.Linear(24, 8, library=("backward",))


def test_errors() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    cases = [
        ((x, torch.ones(5, 3)), {}, "weight: expected shape"),
        ((x, weight.bfloat16()), {}, "weight: expected Float, received BFloat16; pass dtype"),
        ((x, weight, torch.ones(4)), {}, "bias: expected shape"),
        ((x, weight), {"residual": torch.ones(3, 4)}, "residual: expected the shape of the result"),
        ((x.int(), weight), {}, "x: expected fp32, fp64, bf16 or fp16"),
        ((x, weight), {"dtype": torch.int32}, "dtype: expected fp32"),
        ((torch.tensor(1.0), weight), {}, "x: expected shape"),
    ]
    for args, options, message in cases:
        with pytest.raises(RuntimeError, match="linear: " + message):
            shoestring.linear(*args, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="linear_group: biases: expected none or 2"):
        shoestring.linear_group(x, [weight, weight], [None])
    with pytest.raises(ValueError, match="linear: library: expected names"):
        shoestring.linear(x, weight, library="forward")


def test_a_bias_is_added_before_rounding(capability: str) -> None:
    """The result with a bias is as exact as an fp32 sum that is rounded once, also for a bias of fp32.

    Without SIMD instructions and on a GPU, PyTorch computes the product, and the bias is rounded first.
    """
    x, weight = torch.randn(33, 72).bfloat16(), torch.randn(40, 72).bfloat16()
    bias = torch.randn(40) * 30
    exact = x.double() @ weight.double().t() + bias.double()
    rounds_bias = capability in ("plain", "simt", "cuda")
    y = shoestring.linear(x, weight, bias, dtype=torch.bfloat16)
    bound = exact.abs() * 2**-8 + (bias.abs() * 2**-8 if rounds_bias else 0) + 1e-4
    if capability == "cuda":  # cuBLAS may round the product before it adds the bias
        bound += (exact - bias.double()).abs() * 2**-8
    assert (y.double() - exact).abs().le(bound).all()

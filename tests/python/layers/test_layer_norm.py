import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import FLOATS, Operator, normal, uniform
from operator_tests import OperatorTests
from references.layers import add_layer_norm_reference, layer_norm_reference
from relative_error import relative_error
from thread_counts import assert_same_bits

pytestmark = pytest.mark.device

EPS = 1e-5
# Shapes (rows, features): no rows, no features, and odd sizes. On CUDA, one warp reads a row of 192, one block
# a row of 1096, and a block reads a row of 8208 twice. (300, 24) has more rows than one part of the reduction
# over rows.
SIZES = [(0, 64), (3, 0), (5, 77), (9, 192), (3, 1096), (2, 8208), (300, 24)]
SHAPES = [*SIZES, (1, 1)]


class TestLayerNorm(OperatorTests):
    operator = Operator(
        "layer_norm",
        layer_norm_reference,
        lambda rows, features: {
            "x": normal(rows, features, scale=2, mean=0.5),
            "weight": uniform(features, low=0.5, high=1.5),
            "bias": normal(features),
        },
        SIZES,
        [{"eps": EPS}],
    )


def inputs(rows: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random x, weight, bias and gradient of the output of layer_norm, in `dtype`."""
    x, grad = (torch.randn(rows, features).mul(scale).to(dtype) for scale in (2, 1))
    return [x + 0.5, (torch.rand(features) + 0.5).to(dtype), torch.randn(features).to(dtype), grad]


def results(function: object, given: list[Tensor], compute: torch.dtype | None = None) -> list[Tensor]:
    leaves = [t.detach().to(compute or t.dtype).requires_grad_() for t in given[:3]]
    y = function(*leaves, eps=EPS)  # type: ignore[operator]
    return [y, *torch.autograd.grad(y, leaves, given[3].to(y.dtype))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_feature(capability: str, dtype: torch.dtype) -> None:
    """A row of one feature equals its mean, so the result is the bias, and x and the weight have no gradient.

    The gradient of x is a difference of two terms, whose roundings remain.
    """
    x, weight, bias, grad = inputs(1, 1, dtype)
    y, by_x, by_weight, by_bias = results(shoestring.layer_norm, [x, weight, bias, grad])
    assert torch.equal(y[0], bias) and torch.equal(by_bias, grad[0])
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / EPS**0.5
    assert (by_x.abs() <= 2 * rounding * (grad.double() * weight.double()).abs()).all()
    assert (by_weight.abs() <= rounding * (grad.double() * x.double()).abs()).all()


def test_a_mean_that_is_far_from_zero(capability: str) -> None:
    """layer_norm's variance stays accurate for a mean of 1000: it sums squared differences to the mean."""
    x = torch.randn(4, 192) + 1000
    exact = layer_norm_reference(x.double(), eps=EPS)
    ours, eager = shoestring.layer_norm(x, eps=EPS), layer_norm_reference(x, eps=EPS)
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact) <= 1e-3


def test_parts_that_are_missing() -> None:
    x, weight, bias, grad = inputs(7, 96, torch.float32)
    x.requires_grad_()
    for chosen in (
        (None, None),
        (weight.requires_grad_(), None),
        (None, bias.requires_grad_()),
        (weight.detach(), bias),
    ):
        leaves = [t for t in (x, *chosen) if t is not None and t.requires_grad]
        ours, expected = shoestring.layer_norm(x, *chosen, eps=EPS), layer_norm_reference(x, *chosen, eps=EPS)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_weights_of_other_dtypes(capability: str) -> None:
    x, weight, bias, grad = inputs(9, 192, torch.bfloat16)
    for other in ((weight.float(), bias.float()), (weight.float(), bias), (weight.half(), bias.half())):
        given = [x, *other, grad]
        ours, exact = (
            results(shoestring.layer_norm, given),
            results(layer_norm_reference, given, torch.float64),
        )
        assert [t.dtype for t in ours] == [x.dtype, x.dtype, *(t.dtype for t in other)]
        for a, b in zip(ours, exact, strict=True):
            assert relative_error(a, b) <= torch.finfo(a.dtype).eps


def test_what_is_kept() -> None:
    x, weight, bias, _ = (t.requires_grad_() for t in inputs(6, 64, torch.bfloat16))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.layer_norm(x, weight, bias, eps=EPS)
    assert sum(s.numel() * s.element_size() for s in saved) == 6 * 64 * 2 + 2 * 64 * 2 + 2 * 6 * 4


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_fp32_with_a_narrower_result(
    capability: str, shape: tuple[int, int], out: torch.dtype
) -> None:
    """With out_dtype, y is the fp32 result rounded once, and gradients are as exact as eager PyTorch's."""
    x, weight, bias, grad = inputs(*shape, torch.float32)
    branch, more = torch.randn_like(x).to(out), torch.randn_like(x)

    def run(function: object, compute: torch.dtype | None, **options: object) -> list[Tensor]:
        leaves = [t.detach().to(compute or t.dtype).requires_grad_() for t in (branch, x, weight, bias)]
        y, total = function(*leaves, eps=EPS, **options)  # type: ignore[operator]
        return [y, total, *torch.autograd.grad([y, total], leaves, [grad.to(y.dtype), more.to(total.dtype)])]

    ours = run(shoestring.add_layer_norm, None, out_dtype=out)
    eager = run(add_layer_norm_reference, None, out_dtype=out)
    exact = run(add_layer_norm_reference, torch.float64)
    assert [t.dtype for t in ours] == [out, torch.float32, out, *[torch.float32] * 3]
    for name, a, b, c in zip(
        ("y", "sum", "x", "residual", "weight", "bias"), ours, exact, eager, strict=True
    ):
        if a.numel() and shape[1] > 1:
            assert relative_error(a, b) <= 1.1 * relative_error(c, b) + 2e-7, name
    total = ours[1].detach()
    wide = shoestring.layer_norm(total, weight, bias, eps=EPS)
    assert torch.equal(shoestring.layer_norm(total, weight, bias, eps=EPS, out_dtype=out), wide.to(out))
    assert torch.equal(ours[0], wide.to(out)) and torch.equal(ours[2], ours[3].to(out))


def test_a_narrower_result_repeats_compiles_and_keeps_nan(backend: str) -> None:
    branch, x = torch.randn(2, 700 if backend == "simt" else 5000, 96)
    branch = branch.bfloat16()

    def run(function: object = shoestring.add_layer_norm) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (branch, x, torch.ones(96), torch.zeros(96))]
        results: tuple[Tensor, Tensor] = function(  # type: ignore[operator]
            *leaves, eps=EPS, out_dtype=torch.bfloat16
        )
        return [*results, *torch.autograd.grad([t.float().square().sum() for t in results], leaves)]

    assert_same_bits(run, (torch.get_num_threads(), 1, 2, 3))
    compiled = torch.compile(shoestring.add_layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(run(compiled), run(), strict=True):
        torch.testing.assert_close(a, b)
    bad = torch.randn(3, 64)
    bad[1, 3], bad[2, 3] = float("nan"), float("inf")
    y = shoestring.layer_norm(bad, eps=EPS, out_dtype=torch.bfloat16)
    assert y[0].isfinite().all() and y[1:].isnan().all()
    small = (branch[:2].requires_grad_(), x[:2].requires_grad_(), torch.ones(96).requires_grad_())
    options = {"eps": EPS, "out_dtype": torch.bfloat16}
    torch.library.opcheck(torch.ops.shoestring.add_layer_norm.default, small, options)


def test_strides_and_not_finite() -> None:
    x = torch.randn(4, 5, 66, requires_grad=True)[:, 1:4, 1:65].transpose(0, 1)
    torch.testing.assert_close(shoestring.layer_norm(x, eps=EPS), layer_norm_reference(x, eps=EPS))
    bad = torch.randn(3, 64)
    bad[1, 3], bad[2, 3] = float("nan"), float("inf")
    torch.testing.assert_close(
        shoestring.layer_norm(bad, eps=EPS), layer_norm_reference(bad, eps=EPS), equal_nan=True
    )


def test_errors() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="layer_norm: out_dtype: expected None, Float, or bf16 or fp16"):
        shoestring.layer_norm(x, eps=EPS, out_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="layer_norm: residual: expected .* or with the dtype of x"):
        shoestring.add_layer_norm(x.bfloat16(), x, eps=EPS, out_dtype=torch.float16)
    for message, arguments in (
        (
            r"layer_norm: weight: expected \(4\) of a floating-point type on \w+(:0)?, received \[3\] of Float",
            (x, torch.ones(3)),
        ),
        (
            r"layer_norm: bias: expected \(4\) of a floating-point type on \w+(:0)?, received \[4\] of Int",
            (x, None, torch.ones(4, dtype=torch.int32)),
        ),
        (
            r"layer_norm: x: expected \(\.\.\., features\) of fp32, fp64, bf16 or fp16, received \[\] of Float",
            (torch.ones(()),),
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            shoestring.layer_norm(*arguments, eps=EPS)

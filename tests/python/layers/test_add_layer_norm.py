from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import FLOATS, Operator, normal, uniform
from operator_tests import OperatorTests
from references.layers import add_layer_norm_reference

pytestmark = pytest.mark.device

EPS = 1e-5
# Shapes (rows, features): no rows, no features, and odd sizes. On CUDA, one warp reads a row of 192, one
# block a row of 1096, and a block reads a row of 8208 twice. (300, 24) has more rows than one part of the
# reduction over rows.
SHAPES = [(0, 64), (3, 0), (5, 77), (9, 192), (3, 1096), (2, 8208), (300, 24)]


class TestAddLayerNorm(OperatorTests):
    operator = Operator(
        "add_layer_norm",
        add_layer_norm_reference,
        lambda rows, features: {
            "x": normal(rows, features, mean=0.5),
            "residual": normal(rows, features),
            "weight": uniform(features, low=0.5, high=1.5),
            "bias": normal(features),
        },
        SHAPES,
        [{"eps": EPS}],
    )


def inputs(rows: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    """Return x, residual, weight, bias and the gradients of both outputs of add_layer_norm."""
    x, residual, grad, grad_sum = (torch.randn(rows, features).to(dtype) for _ in range(4))
    weight, bias = torch.rand(features) + 0.5, torch.randn(features)
    return [x + 0.5, residual, weight.to(dtype), bias.to(dtype), grad, grad_sum]


def results(function: Any, given: list[Tensor], compute: torch.dtype | None = None) -> list[Tensor]:
    leaves = [t.detach().to(compute or t.dtype).requires_grad_() for t in given[:4]]
    made = function(*leaves, eps=EPS)
    return [*made, *torch.autograd.grad(made, leaves, [g.to(made[0].dtype) for g in given[4:]])]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_layer_norm_of_the_sum(capability: str, dtype: torch.dtype) -> None:
    """Fusing the sum changes no bit of the normalised rows, because the sum is rounded before the norm."""
    x, residual, weight, bias, *_ = inputs(37, 200, dtype)
    y, total = shoestring.add_layer_norm(x, residual, weight, bias, eps=EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, shoestring.layer_norm(total, weight, bias, eps=EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_narrow_x_is_added_to_an_fp32_residual(
    capability: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Under autocast, x is 16-bit. All bits equal those of an fp32 x, and the gradient of x is rounded."""
    x, residual, weight, bias, grad, grad_sum = inputs(*shape, torch.float32)
    narrow = x.to(dtype)
    ours = results(shoestring.add_layer_norm, [narrow, residual, weight, bias, grad, grad_sum])
    wide = results(shoestring.add_layer_norm, [narrow.float(), residual, weight, bias, grad, grad_sum])
    assert ours[2].dtype == dtype and torch.equal(ours[2], wide[2].to(dtype))
    for i in (0, 1, 3, 4, 5):
        assert ours[i].dtype == torch.float32 and torch.equal(ours[i], wide[i])


def test_one_of_the_results_alone() -> None:
    leaves = [t.requires_grad_() for t in inputs(6, 33, torch.float32)[:4]]
    for index in (0, 1):
        ours = shoestring.add_layer_norm(*leaves, eps=EPS)[index]
        expected = add_layer_norm_reference(*leaves, eps=EPS)[index]
        found, wanted = (
            torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (ours, expected)
        )
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_is_kept() -> None:
    leaves = [t.requires_grad_() for t in inputs(6, 64, torch.bfloat16)[:4]]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.add_layer_norm(*leaves, eps=EPS)
    assert sum(s.numel() * s.element_size() for s in saved) == 6 * 64 * 2 + 2 * 64 * 2 + 2 * 6 * 4


def test_strides_and_not_finite() -> None:
    x, residual = torch.randn(2, 4, 5, 66)[..., 1:4, 1:65].transpose(1, 2)
    x[1, 2, 3], x[2, 2, 3] = float("nan"), float("inf")
    for a, b in zip(
        shoestring.add_layer_norm(x, residual, eps=EPS),
        add_layer_norm_reference(x, residual, eps=EPS),
        strict=True,
    ):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_errors() -> None:
    x = torch.ones(3, 4)
    for residual in (torch.ones(4), torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3, 4).double()):
        with pytest.raises(
            RuntimeError, match="layer_norm: residual: expected x's shape, dtype and device, .* received"
        ):
            shoestring.add_layer_norm(x, residual, eps=EPS)

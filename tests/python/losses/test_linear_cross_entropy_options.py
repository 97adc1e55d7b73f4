"""Test the options of linear_cross_entropy, and the statistics that it returns beside the loss."""

from typing import Any

import pytest
import torch
from test_linear_cross_entropy import arguments, make, reference
from torch import Tensor
from torch.nn import functional as F

import shoestring
from loss_cases import OPTIONS
from operator_cases import FLOATS, Arguments, Operator, casts, label, on_gpu, slack_of_products
from operator_tests import OperatorTests
from references.losses import cross_entropy_reference
from shoestring.losses.linear_cross_entropy import LinearCrossEntropyStats

pytestmark = pytest.mark.device


def slack(elements: int, dtype: torch.dtype) -> float:
    """Allow more on GPUs, which also round the sum of the gradients of several results."""
    return slack_of_products(elements, dtype) + torch.finfo(dtype).eps / 8 * on_gpu()


@pytest.mark.slow
@pytest.mark.sample(cpu=64, simt=16)
class TestLinearCrossEntropyWithStats(OperatorTests):
    operator = Operator(
        "linear_cross_entropy_with_stats",
        reference,
        arguments,
        [(2, 2), (17, 257), (35, 4099)],
        OPTIONS,
        FLOATS[:3],
        factor=1.5,
        traced=2,
        slack=slack,
        autocast=casts("hidden", "weight", "bias"),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_statistics_change_no_bit_of_the_loss(options: Arguments, seed: int) -> None:
    """The gradients are equal too: without a use of the statistics, no logits are computed twice."""
    given = TestLinearCrossEntropyWithStats.operator.case(17, 257, options=options).given(seed)
    leaves = [given[name] for name in ("hidden", "weight", "bias")]
    alone = shoestring.linear_cross_entropy(**given)
    stats = shoestring.linear_cross_entropy_with_stats(**given)
    assert isinstance(stats, LinearCrossEntropyStats) and torch.equal(stats.loss, alone)
    for a, b in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (alone, stats.loss)), strict=True):
        assert torch.equal(a, b)


def test_token_weights_and_logit_scale_have_gradients() -> None:
    hidden, weight, bias, target = make(6, 4, 9, torch.float64)
    target[0] = 3
    weights = torch.rand(6, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "sum", "none"):

        def run(w: Tensor, s: Tensor, h: Tensor) -> Tensor:
            options = dict(reduction=reduction, token_weights=w, logit_scale=s, softcap=2.0)
            return shoestring.linear_cross_entropy(h, weight, target, bias, **options)

        assert torch.autograd.gradcheck(run, (weights, scale, hidden))


def test_shift_is_the_slices() -> None:
    hidden, weight, bias = torch.randn(3, 8, 4, requires_grad=True), torch.randn(11, 4), torch.randn(11)
    target = torch.randint(11, (3, 8))
    target[1, 3:5] = -100
    shifted = shoestring.linear_cross_entropy(hidden, weight, target, bias, shift=True)
    sliced = shoestring.linear_cross_entropy(hidden[:, :-1], weight, target[:, 1:], bias)
    torch.testing.assert_close(shifted, sliced)
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden)[0] for x in (shifted, sliced)))
    each = shoestring.linear_cross_entropy(hidden, weight, target, bias, shift=True, reduction="none")
    assert each.shape == target.shape and (each[:, -1] == 0).all()


def test_ignored_tokens_have_no_statistics_and_no_gradient() -> None:
    hidden, weight, bias, target = make(5, 4, 9, ignored=0)
    target[2] = -100
    with torch.no_grad():
        hidden[2] = float("nan")
    stats = shoestring.linear_cross_entropy_with_stats(
        hidden, weight, target, bias, reduction="none", z_loss=1.0
    )
    assert all(x[2] == 0 and x.isfinite().all() for x in stats[:4]) and stats.argmax[2] == -1
    total = sum(x.sum() for x in stats[:4])
    grads = torch.autograd.grad(total, (hidden, weight, bias))
    assert (grads[0][2] == 0).all() and all(g.isfinite().all() for g in grads)


def test_tokens_without_weight_are_a_mean_over_nothing() -> None:
    hidden, weight, bias, target = make(5, 4, 9, ignored=0)
    for options in ({"token_weights": torch.zeros(5)}, {"class_weights": torch.zeros(9)}):
        loss = shoestring.linear_cross_entropy(hidden, weight, target, bias, **options)
        assert loss.isnan()
        expected = cross_entropy_reference(F.linear(hidden, weight, bias), target, **options).loss
        assert expected.isnan()


def test_a_confident_row_s_entropy_is_zero_and_ruled_out_classes_do_not_show() -> None:
    hidden = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -float("inf")])
    stats = shoestring.linear_cross_entropy_with_stats(hidden, weight, torch.tensor([0]), bias)
    assert stats.entropy == 0 and stats.lse == 300 and stats.argmax == 0
    assert all((g == 0).all() for g in torch.autograd.grad(stats.entropy.sum(), (hidden, weight)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_weights": torch.ones(8)}, r"class_weights: expected a floating tensor of shape \[9\]"),
        ({"class_weights": torch.ones(9, dtype=torch.int64)}, "class_weights: expected a floating tensor"),
        ({"token_weights": torch.ones(5)}, r"token_weights: expected a floating tensor of shape \[6\]"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0, received -1"),
        ({"logit_scale": 0.0}, "logit_scale: expected a number that is not 0, received 0"),
        ({"logit_scale": float("nan")}, "logit_scale: expected a number that is not 0, received nan"),
        ({"logit_scale": torch.ones(2)}, r"logit_scale: expected a number or one element, received \(2,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_option(change: dict[str, Any], message: str) -> None:
    arguments = (torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises((RuntimeError, ValueError), match=f"linear_cross_entropy: {message}"):
        shoestring.linear_cross_entropy_with_stats(*arguments, **change)

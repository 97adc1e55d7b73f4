import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shoestring
from operator_cases import Operator, integers, normal
from operator_tests import OperatorTests
from references.layers import seeded_dropout_reference

pytestmark = pytest.mark.device

# Element counts: one, just below and above a SIMD vector and a block of 256, and several blocks.
SIZES = [1, 7, 255, 256, 259, 5000]


class TestSeededDropout(OperatorTests):
    operator = Operator(
        "seeded_dropout",
        seeded_dropout_reference,
        lambda rows, features: {
            "x": normal(rows, features),
            "seed": integers(1, low=-(2**63), high=2**63 - 1),
        },
        sizes=[(0, 3), (5, 77)],
        options=[{"p": 0.4}],
        twice_differentiable=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_reference(capability: str, dtype: torch.dtype) -> None:
    """seeded_dropout drops the same elements as its reference, and kept values differ by rounding at most."""
    for size in SIZES:
        for p, seed in ((0.1, 0), (0.5, 2**63 - 1), (0.999, -5)):
            x, number = torch.randn(size).to(dtype), torch.tensor([seed])
            ours, expected = (
                shoestring.seeded_dropout(x, p, seed=number),
                seeded_dropout_reference(x, number, p),
            )
            assert torch.equal(ours == 0, expected == 0)
            torch.testing.assert_close(ours, expected)


def test_share_and_mean() -> None:
    x = torch.ones(1 << 16)
    for p in (0.05, 0.3, 0.9):
        y = shoestring.seeded_dropout(x, p, seed=torch.tensor([11]))
        deviation = (p * (1 - p) / x.numel()) ** 0.5
        assert abs((y == 0).double().mean().item() - p) <= 5 * deviation
        assert abs(y.double().mean().item() - 1) <= 5 * deviation / (1 - p)
    assert not torch.equal(y, shoestring.seeded_dropout(x, 0.9, seed=torch.tensor([12])))
    assert torch.equal(shoestring.seeded_dropout(x, 0.0, seed=torch.tensor([1])), x)


def test_a_checkpoint_draws_the_same_seed_again() -> None:
    def block(t: torch.Tensor) -> torch.Tensor:
        return shoestring.seeded_dropout(t.sin(), 0.5).exp()

    # Activation checkpointing restores the RNG state, so the recomputed block draws the same dropout seed as
    # in forward.
    values = torch.randn(300, requires_grad=True)
    torch.manual_seed(5)
    plain = torch.autograd.grad(block(values).sum(), values)[0]
    torch.manual_seed(5)
    again = torch.autograd.grad(checkpoint(block, values, use_reentrant=False).sum(), values)[0]
    assert torch.equal(plain, again)


def test_errors() -> None:
    with pytest.raises(
        RuntimeError, match=r"seeded_dropout: dropout: expected a probability in \[0, 1\), received 1"
    ):
        shoestring.seeded_dropout(torch.ones(3), 1.0)
    with pytest.raises(
        RuntimeError, match="seeded_dropout: x: expected fp32, fp64, bf16 or fp16, received Long"
    ):
        shoestring.seeded_dropout(torch.ones(3, dtype=torch.int64), 0.5)
    with pytest.raises(RuntimeError, match="seeded_dropout: seed: expected one int64 on"):
        shoestring.seeded_dropout(torch.ones(3), 0.5, seed=torch.tensor([1, 2]))

import pytest
import torch

import shoestring
from operator_cases import ELEMENTWISE, Operator, normal, slack_of_gelu
from operator_tests import OperatorTests
from references.layers import geglu_reference

pytestmark = pytest.mark.device

KINDS = ["none", "tanh"]


class TestGeglu(OperatorTests):
    operator = Operator(
        "geglu",
        geglu_reference,
        lambda rows, features: {"gate": normal(rows, features, scale=3), "up": normal(rows, features)},
        sizes=ELEMENTWISE,
        options=[{"approximate": kind} for kind in KINDS],
        slack=slack_of_gelu,
    )


@pytest.mark.parametrize("approximate", KINDS)
def test_digits_far_below_zero(capability: str, approximate: str) -> None:
    """Far below zero, the relative error of geglu is at most 5e-7 + 2e-7 times the magnitude of an exponent.

    GELU contains the exponential of this number. With approximate="none" the exponent is -x^2 / 2. With
    "tanh" GELU is x * sigmoid(2u), and the exponent is 2u.
    """
    gate = torch.linspace(-12 if approximate == "none" else -7, 9, 4001)
    x = gate.double()
    exponent = 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    exact = x * (torch.special.erfc(-x / 2**0.5) / 2 if approximate == "none" else exponent.sigmoid())
    ours = shoestring.geglu(gate, torch.ones_like(gate), approximate).double()
    exponent = x.square() / 2 if approximate == "none" else exponent.abs()
    allowed = (5e-7 + 2e-7 * exponent) * exact.abs()
    assert ((ours - exact).abs() <= allowed + 1e-37).all()


@pytest.mark.parametrize("approximate", KINDS)
def test_large_and_not_finite(capability: str, approximate: str) -> None:
    gate = torch.tensor([-1e30, -200.0, 0.0, 90.0, 1e30, float("inf"), float("nan"), 1.0])
    up = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, float("nan")])
    gate.requires_grad_(), up.requires_grad_()
    y = shoestring.geglu(gate, up, approximate)
    by_gate, by_up = torch.autograd.grad(y.sum(), (gate, up))
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 1e30, float("inf"), float("nan"), float("nan")])
    assert torch.equal(y.nan_to_num(nan=7), expected.nan_to_num(nan=7))
    torch.testing.assert_close(by_gate[:5], torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]))
    assert by_gate[6:].isnan().all()
    assert torch.equal(by_up[:6], expected[:6])


def test_what_is_kept() -> None:
    gate, up = (torch.randn(4, 9, requires_grad=True) for _ in range(2))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.geglu(gate, up)
    assert len(saved) == 2


def test_errors() -> None:
    with pytest.raises(
        RuntimeError,
        match="geglu: gate: expected the shape, dtype and device of the tensor that it multiplies",
    ):
        shoestring.geglu(torch.ones(3), torch.ones(4))
    with pytest.raises(RuntimeError, match="geglu: approximate: expected 'tanh' or 'none', received 'erf'"):
        shoestring.geglu(torch.ones(3), torch.ones(3), "erf")
    with pytest.raises(RuntimeError, match="geglu: up: expected fp32, fp64, bf16 or fp16, received Int"):
        shoestring.geglu(torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))

import pytest
import torch

import shoestring
from references.layers import geglu_reference
from relative_error import relative_error

pytestmark = pytest.mark.device

# Element counts: none, less than one SIMD vector, several vectors and a remainder, and enough for two
# threads.
SIZES = [0, 3, 77, 33000]
KINDS = ["tanh", "none"]


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_no_worse_than_eager(capability: str, size: int, dtype: torch.dtype, approximate: str) -> None:
    gate, up, upstream = (torch.randn(size).mul(scale).to(dtype) for scale in (3, 1, 1))
    results = []
    for operator, compute in (
        (shoestring.geglu, dtype),
        (geglu_reference, torch.float64),
        (geglu_reference, dtype),
    ):
        g, u = gate.to(compute).requires_grad_(), up.to(compute).requires_grad_()
        y = operator(g, u, approximate)
        results.append((y, *torch.autograd.grad(y, (g, u), upstream.to(compute))))
    for ours, exact, eager in zip(*results, strict=True):
        assert ours.dtype == dtype and ours.shape == (size,)
        if size:
            # Over few elements eager's error may happen to be almost 0, so allow errors of two roundings.
            least = 1e-7 if size > 100 else 2 * torch.finfo(torch.float32).eps
            assert relative_error(ours, exact) <= 1.1 * relative_error(eager, exact) + least


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


def test_strides_and_what_is_kept() -> None:
    gate, up = torch.randn(9, 4).t().requires_grad_(), torch.randn(4, 9, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = shoestring.geglu(gate, up)
    assert len(saved) == 2
    expected = geglu_reference(gate, up)
    torch.testing.assert_close(y, expected)
    for a, b in zip(
        torch.autograd.grad(y.sum(), (gate, up)), torch.autograd.grad(expected.sum(), (gate, up)), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert torch.equal(shoestring.geglu(gate, up), y)
    with torch.autocast(gate.device.type, torch.bfloat16):
        assert torch.equal(shoestring.geglu(gate, up), y)


@pytest.mark.parametrize("approximate", KINDS)
def test_gradcheck_opcheck_and_compiled(approximate: str) -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: shoestring.geglu(g, u, approximate), (gate, up))
    pair = tuple(torch.randn(4, 70, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.shoestring.geglu.default, (*pair, approximate))
    y = shoestring.geglu(*pair, approximate)
    with pytest.raises(RuntimeError, match="geglu: the backward pass is not differentiable"):
        torch.autograd.grad(y.sum(), pair[0], create_graph=True)[0].sum().backward()
    compiled = torch.compile(
        lambda g, u: shoestring.geglu(g, u, approximate), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (4, 2):
        few = [t[:rows].detach().requires_grad_() for t in pair]
        ours, plain = compiled(*few), shoestring.geglu(*few, approximate)
        assert torch.equal(ours, plain)
        assert torch.equal(torch.autograd.grad(ours.sum(), few)[0], torch.autograd.grad(plain.sum(), few)[0])


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

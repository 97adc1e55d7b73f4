import pytest
import torch

import shoestring
from operator_cases import ELEMENTWISE, Operator, normal, slack_of_gelu
from operator_tests import OperatorTests
from references.layers import gelu_reference

pytestmark = pytest.mark.device

KINDS = ["none", "tanh"]


class TestGelu(OperatorTests):
    operator = Operator(
        "gelu",
        gelu_reference,
        lambda rows, features: {"x": normal(rows, features, scale=3)},
        sizes=ELEMENTWISE,
        options=[{"approximate": kind} for kind in KINDS],
        slack=slack_of_gelu,
    )


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_geglu_with_a_factor_of_one(capability: str, dtype: torch.dtype, approximate: str) -> None:
    """gelu and geglu share their kernels, so a factor of 1 changes no bit of the result or the gradient."""
    x, upstream = torch.randn(2, 77).mul(6).to(dtype)
    found = []
    for operator in (shoestring.gelu, lambda x, kind: shoestring.geglu(x, torch.ones_like(x), kind)):
        leaf = x.detach().requires_grad_()
        y = operator(leaf, approximate)
        found += [y, torch.autograd.grad(y, leaf, upstream)[0]]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("approximate", KINDS)
def test_large_and_not_finite(capability: str, approximate: str) -> None:
    x = torch.tensor([-1e30, -200.0, 0.0, 90.0, 1e30, float("inf"), float("nan")], requires_grad=True)
    y = shoestring.gelu(x, approximate)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 1e30, float("inf"), float("nan")])
    assert torch.equal(y.nan_to_num(nan=7), expected.nan_to_num(nan=7))
    torch.testing.assert_close(gradient[:5], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert gradient[6].isnan()


def test_what_is_kept() -> None:
    x = torch.randn(300, 200).t().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.gelu(x)
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "holder", ["nothing", "linear", "base", "user", "detached", "view", "hooks", "graph"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradient_replaces_an_input_that_nothing_else_holds(dtype: torch.dtype, holder: str) -> None:
    leaf = torch.randn(41, 33, dtype=dtype).requires_grad_()
    x, seen = leaf * 2 if holder != "view" else (leaf * 2)[1:], []
    base = None
    if holder in ("linear", "base"):  # a linear layer with a bias returns a view of all of its product
        base = leaf * 2
        x = base.view(41, 3, 11)
    x.grad_fn.register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    address, held = x.data_ptr(), []
    if holder == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            y = shoestring.gelu(x)
    else:
        y = shoestring.gelu(x)
    if holder in ("user", "detached"):
        held = [x if holder == "user" else x.detach()]
    copies = [t.detach().clone() for t in held]
    if holder == "base":
        held, copies = [base], [base.detach().clone()]
    del x, base
    y.sum().backward(retain_graph=holder == "graph")
    assert (seen == [address]) == (holder in ("nothing", "linear") and dtype != torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    rows = leaf.detach()[1:] if holder == "view" else leaf.detach()
    expected = 2 * torch.ops.shoestring._gelu_backward(torch.ones_like(rows), 2 * rows, "none")
    assert torch.equal(leaf.grad[-len(rows) :], expected)
    if holder == "graph":
        leaf.grad = None
        y.sum().backward()
        assert torch.equal(leaf.grad, expected)


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="gelu: approximate: expected 'tanh' or 'none', received 'erf'"):
        shoestring.gelu(torch.ones(3), "erf")
    with pytest.raises(RuntimeError, match="gelu: x: expected fp32, fp64, bf16 or fp16, received Int"):
        shoestring.gelu(torch.ones(3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="_gelu_backward: grad: expected the shape, dtype and device of x"):
        torch.ops.shoestring._gelu_backward(torch.ones(3), torch.ones(4), "none")

from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from operator_cases import ELEMENTWISE, Operator, normal
from operator_tests import OperatorTests
from references.layers import swiglu_reference

pytestmark = pytest.mark.device


class TestSwiglu(OperatorTests):
    operator = Operator(
        "swiglu",
        swiglu_reference,
        lambda rows, features: {"gate": normal(rows, features, scale=4), "up": normal(rows, features)},
        sizes=ELEMENTWISE,
        slack=1e-7,
    )


def test_large_and_not_finite() -> None:
    """swiglu agrees with its reference where the sigmoid saturates, and returns NaN for NaN inputs."""
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("inf"), float("nan"), 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, float("nan")])
    results = []
    for operator in (shoestring.swiglu, swiglu_reference):
        g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
        y = operator(g, u)
        results.append((y, *torch.autograd.grad(y.sum(), (g, u))))
    for ours, expected in zip(*results, strict=True):
        finite = expected.isfinite()
        assert torch.equal(ours.isnan()[-2:], expected.isnan()[-2:])
        torch.testing.assert_close(ours[finite], expected[finite], atol=1e-30, rtol=1e-6)


def test_what_is_kept() -> None:
    gate, up = torch.randn(4, 9, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        shoestring.swiglu(gate, up)
    assert len(saved) == 2


def test_errors() -> None:
    with pytest.raises(
        RuntimeError,
        match="swiglu: gate: expected the shape, dtype and device of the tensor that it multiplies",
    ):
        shoestring.swiglu(torch.ones(3), torch.ones(4))
    with pytest.raises(RuntimeError, match="swiglu: up: expected fp32, fp64, bf16 or fp16, received Int"):
        shoestring.swiglu(torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))


HOLDERS = ["nothing", "user", "hooks", "detached", "view", "same", "graph"]


@pytest.mark.parametrize("function", [shoestring.swiglu, shoestring.geglu], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_gradients_replace_inputs_that_nothing_else_holds(
    function: Any, dtype: torch.dtype, holder: str
) -> None:
    """Backward writes its results over gate and up only if it is their sole owner; gradients stay equal."""
    x = torch.randn(2, 40, 33, dtype=dtype)
    leaf = x.clone().requires_grad_()
    gate, up = (leaf * 2).unbind() if holder == "view" else (leaf[0] * 2, leaf[1] * 2)
    up = gate if holder == "same" else up
    addresses, seen = {gate.data_ptr(), up.data_ptr()}, []
    for part in (gate, up):
        part.grad_fn.register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    held: list[Tensor] = []
    if holder == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            y = function(gate, up)
    else:
        y = function(gate, up)
    if holder in ("user", "detached"):
        held = [gate, up] if holder == "user" else [gate.detach(), up.detach()]
    copies = [t.detach().clone() for t in held]
    del gate, up, part
    y.sum().backward(retain_graph=holder == "graph")
    assert addresses.isdisjoint(seen) == (holder != "nothing" or dtype == torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))

    again = x.clone().requires_grad_()
    gate, up = (again * 2).unbind()
    function(gate, gate if holder == "same" else up).sum().backward()
    assert torch.equal(leaf.grad, again.grad)
    if holder == "graph":
        leaf.grad = None
        y.sum().backward()
        assert torch.equal(leaf.grad, again.grad)

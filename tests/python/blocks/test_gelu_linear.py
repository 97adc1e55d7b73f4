"""GELU with the linear layer after it, which patch() uses, computes what the two layers compute."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shoestring
from relative_error import relative_error
from shoestring.gemm.linear import PRODUCTS, library_sum

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LIBRARY = library_sum("linear", PRODUCTS)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str = "none", **options: Any) -> Tensor:
    result: Tensor = torch.ops.shoestring._gelu_linear(x, weight, bias, kind, **options)
    return result


def inputs(tokens: int = 37, features: int = 45, out: int = 20) -> list[Tensor]:
    return [torch.randn(2, tokens, features), torch.randn(out, features) / features**0.5, torch.randn(out)]


def results(function: Any, given: list[Tensor], dtype: torch.dtype, upstream: Tensor) -> list[Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in given]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, upstream.to(dtype))]


@pytest.mark.parametrize("kind", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_eager(capability: str, dtype: torch.dtype, kind: str) -> None:
    given = [t.to(dtype) for t in inputs()]
    upstream = torch.randn(2, 37, 20).to(dtype)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.gelu(x, approximate=kind), weight, bias)

    exact = results(plain, given, torch.float64, upstream)
    eager = results(plain, given, dtype, upstream)
    for library in (0, LIBRARY):
        ours = results(
            lambda *t, library=library: gelu_linear(*t, kind, library=library), given, dtype, upstream
        )
        for a, b, c in zip(ours, exact, eager, strict=True):
            assert a.dtype == dtype and a.shape == c.shape
            assert relative_error(a, b) <= 1.2 * relative_error(c, b) + 1e-6


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equals_both_operators_and_overwrites_what_nobody_holds(dtype: torch.dtype, held: bool) -> None:
    """All bits are those of gelu and linear. The gradient of x takes the memory of x if nobody holds x."""
    given = [t.to(dtype) for t in inputs()]
    made = []
    for function in (gelu_linear, lambda x, *rest: shoestring.linear(shoestring.gelu(x), *rest)):
        leaves = [t.detach().requires_grad_() for t in given]
        x, seen = leaves[0] * 1, []
        x.grad_fn.register_prehook(lambda grads, seen=seen: seen.append(grads[0].data_ptr()))
        address, kept = x.data_ptr(), [x] if held else []
        y = function(x, *leaves[1:])
        del x
        y.sum().backward()
        made.append([y, *(leaf.grad for leaf in leaves)])
        if function is gelu_linear:
            assert (seen == [address]) == (not held)
        assert all(torch.equal(t, given[0]) for t in kept)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_saves_its_input_alone() -> None:
    x, weight, bias = (t.requires_grad_() for t in inputs())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gelu_linear(x, weight, bias)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}


def test_frozen_parts_no_bias_and_two_backwards() -> None:
    given = inputs()
    for frozen in range(3):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(given)]
        twins = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
        y, expected = gelu_linear(*leaves), F.linear(F.gelu(twins[0]), *twins[1:])
        expected.square().sum().backward()
        for _ in range(2):
            for leaf in leaves:
                leaf.grad = None
            y.square().sum().backward(retain_graph=True)
            for leaf, twin in zip(leaves, twins, strict=True):
                assert (leaf.grad is None) == (twin.grad is None)
                if leaf.grad is not None:
                    torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-4, atol=1e-4)
    x, weight, _ = (t.requires_grad_() for t in given)
    torch.testing.assert_close(gelu_linear(x, weight, None), F.linear(F.gelu(x), weight))
    strided = torch.randn(45, 30).t()
    torch.testing.assert_close(gelu_linear(strided, weight, None), F.linear(F.gelu(strided), weight))
    with torch.no_grad():
        assert not gelu_linear(x, weight, None).requires_grad
    with pytest.raises(RuntimeError, match="_gelu_linear: the backward pass is not differentiable"):
        torch.autograd.grad(gelu_linear(x, weight, None).sum(), x, create_graph=True)[0].sum().backward()


def test_autocast() -> None:
    """Under autocast, the weights keep their dtype, and gradients have the dtypes of the inputs."""
    x, weight, bias = (t.requires_grad_() for t in inputs())
    narrow = x.detach().bfloat16().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        for each in (x, narrow):
            y = gelu_linear(each, weight, bias)
            assert y.dtype == torch.bfloat16
            grads = torch.autograd.grad(y.sum(), (each, weight, bias))
            assert [g.dtype for g in grads] == [each.dtype, torch.float32, torch.float32]
            exact = F.linear(F.gelu(each.double()), weight.double(), bias.double())
            assert relative_error(y, exact) < 0.01


def test_gradcheck_opcheck_and_compiled() -> None:
    wide = [t.double().requires_grad_() for t in inputs(3, 5, 4)]
    assert torch.autograd.gradcheck(gelu_linear, wide)
    leaves = [t.requires_grad_() for t in inputs()]
    torch.library.opcheck(torch.ops.shoestring._gelu_linear.default, (*leaves, "none"))
    compiled = torch.compile(gelu_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (37, 12):
        given = inputs(tokens)
        upstream = torch.randn(2, tokens, 20)
        ours, plain = (results(f, given, torch.float32, upstream) for f in (compiled, gelu_linear))
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))

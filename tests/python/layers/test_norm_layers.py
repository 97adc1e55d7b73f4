"""Test that the norm modules of shoestring.nn compute what torch.nn computes, and load its state_dicts."""

import pytest
import torch
from torch import Tensor, nn

import shoestring

pytestmark = pytest.mark.device


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Load the state_dict of `theirs` into `ours`, and compare the results and gradients of both modules."""
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.rand_like(p))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 3, 24)
    for a, b in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


def test_torch_has_the_same() -> None:
    assert_same(shoestring.nn.RMSNorm(24, 1e-5, upcast="gemma"), nn.RMSNorm(24, 1e-5))
    assert_same(shoestring.nn.LayerNorm(24), nn.LayerNorm(24))
    assert_same(shoestring.nn.LayerNorm(24, 1e-3, bias=False), nn.LayerNorm(24, 1e-3, bias=False))


def test_a_new_norm_only_normalises_and_adds() -> None:
    x, residual = torch.randn(4, 24), torch.randn(4, 24)
    for offset in (0.0, 1.0):
        norm = shoestring.nn.RMSNorm(24, offset=offset, dtype=torch.bfloat16)
        y, total = norm.forward_with_residual(x, residual)
        assert (
            torch.equal(total, x + residual)
            and torch.equal(y, norm(total))
            and norm.weight.dtype == torch.bfloat16
        )
        torch.testing.assert_close(y.square().mean(-1), torch.ones(4))
    layer = shoestring.nn.LayerNorm(24)
    y, total = layer.forward_with_residual(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(y, layer(total))
    assert repr(norm) == "RMSNorm(24, eps=1e-06, offset=1.0, upcast='llama')"
    assert repr(shoestring.nn.LayerNorm(8)) == "LayerNorm(8, eps=1e-05, bias=True)"

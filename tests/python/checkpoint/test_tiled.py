"""Test shoestring.tiled and tiled_features against the same layers without tiles.

Tiling changes the order of sums, so the tolerances are those of fp32 sums of some hundred terms.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from shoestring.checkpoint.measure import metered

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# 7 tokens in one tile, in three tiles of different sizes, and in one tile per token.
@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_tokens(tiles: int) -> None:
    mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(2, 7, 16, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).square().sum(), leaves)
    y = shoestring.tiled(mlp, x, tiles=tiles)
    torch.testing.assert_close(y, mlp(x), **CLOSE)
    for ours, plain in zip(torch.autograd.grad(y.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(ours, plain, **CLOSE)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up)), down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features(dtype: torch.dtype) -> None:
    leaves = [(torch.randn(shape) / 4).to(dtype).requires_grad_() for shape in ((5, 16), (50, 16), (16, 50))]
    x, up, down = leaves
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    tiles = 3
    y = shoestring.tiled_features(mlp, x, [(up, 0), (down, 1)], tiles=tiles)
    exact = mlp(*wide)

    def check(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
        """Require at most twice the error without tiles, and the rounding of each tile and of their sum."""
        rounding = 2 * tiles * torch.finfo(dtype).eps / 2 * exact.abs().max()
        assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + rounding

    check(y, mlp(*leaves), exact)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    plain = torch.autograd.grad(mlp(*leaves).square().sum(), leaves)
    for ours, theirs, best in zip(grads, plain, torch.autograd.grad(exact.square().sum(), wide), strict=True):
        check(ours, theirs, best)
    joined = shoestring.tiled_features(F.linear, x, [(up, 0)], tiles=4, combine="cat")
    torch.testing.assert_close(
        joined, F.linear(x, up), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_memory_is_that_of_a_tile() -> None:
    model, x = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32)), torch.randn(512, 32)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def peak(tiles: int) -> int:
        with metered() as meter:
            (model(x) if tiles == 0 else shoestring.tiled(model, x, tiles=tiles)).sum().backward()
            return meter.peak()

    inner = 512 * 1024 * 4
    whole, eighth = peak(0), peak(8)
    # Without tiles, the model allocates the outputs of its first linear layer and of GELU, and their
    # gradients. With tiles, it allocates these tensors for one tile only, and the gradients of the weights.
    assert whole >= 3 * inner
    assert eighth <= 4 * inner / 8 + 4 * 2 * 1024 * 32 * 4 + 6 * x.nbytes


def test_errors() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with pytest.raises(
        ValueError, match=r"tiled: tiles: expected 1 to the number of elements along dim \(3\), received 4"
    ):
        shoestring.tiled(torch.exp, x, tiles=4)
    with pytest.raises(ValueError, match="tiled: fn: expected a result of 3 elements along dim -2"):
        shoestring.tiled(lambda t: t[:1], x, tiles=1)
    with pytest.raises(ValueError, match="tiled_features: weights: expected weights of the same size"):
        shoestring.tiled_features(mlp, x, [(w, 0), (x, 0)], tiles=2)
    with pytest.raises(ValueError, match="tiled_features: tiles: expected 1 to the number of features"):
        shoestring.tiled_features(mlp, x, [(w, 0)], tiles=5)
    with pytest.raises(ValueError, match="combine: expected"):
        shoestring.tiled_features(mlp, x, [(w, 0)], tiles=2, combine="mean")

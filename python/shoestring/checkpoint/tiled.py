"""Layers too large for memory, a tile at a time (memory-centric tiling, Rajbhandari et al. 2021; Bekman et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.function import checkpoint


def tiled(fn: Callable[..., Tensor], x: Tensor, *, tiles: int, dim: int = -2, **options: Any) -> Tensor:
    """``fn(x)`` in tiles of ``x``: what ``fn`` makes on the way exists for one tile at a time, in backward too.

    For what treats the places along ``dim`` apart, such as an MLP its tokens: its intermediate tensors then take
    1 / ``tiles`` of their memory, for one more forward in backward. The values are those of ``fn(x)`` to the rounding
    that products of other sizes have; gradients of weights are sums over the tiles.

    Args:
        fn: takes a tile of ``x`` and returns one of the result, as long along ``dim``.
        x: any shape; backward keeps it and nothing else.
        tiles: how many, of about equal length; no more than places along ``dim``.
        dim: of ``x`` and of the result; the tokens of (..., tokens, features) by default.
        options: of :func:`checkpoint`.

    Raises:
        ValueError: tiles out of range, or a result of another length.
    """
    _check("tiled", tiles, x.shape[dim], "places along dim")
    parts = []
    for tile in x.tensor_split(tiles, dim):
        part = checkpoint(fn, tile, **options)
        if part.shape[dim] != tile.shape[dim]:
            raise ValueError(
                f"tiled: fn: expected a result of {tile.shape[dim]} places along dim {dim}, as its tile has, "
                f"received {part.shape[dim]}"
            )
        parts.append(part)
    return torch.cat(parts, dim)


def tiled_features(
    fn: Callable[..., Tensor],
    x: Tensor,
    weights: Sequence[tuple[Tensor, int]],
    *,
    tiles: int,
    combine: str = "sum",
    **options: Any,
) -> Tensor:
    """``fn(x, *weights)`` in tiles of the weights: of their features, and of what is made of them, one tile exists.

    An MLP's inner features: ``tiled_features(lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down), x,
    [(up, 0), (down, 1)], tiles=4)``.

    Args:
        fn: takes ``x`` and a tile of each weight.
        weights: each with the dimension along which its features lie; equally long there.
        tiles: how many, of about equal length.
        combine: "sum" adds the results of the tiles (in fp32, and rounds once), "cat" puts them one after the other
            along the last dimension (a linear layer's output features).
        options: of :func:`checkpoint`.

    Raises:
        ValueError: tiles out of range, weights of different lengths, or another ``combine``.
    """
    lengths = {weight.shape[dim] for weight, dim in weights}
    if len(lengths) != 1:
        raise ValueError(
            f"tiled_features: weights: expected the same length along each's dim, received {sorted(lengths)}"
        )
    if combine not in ("sum", "cat"):
        raise ValueError(f'tiled_features: combine: expected "sum" or "cat", received {combine!r}')
    _check("tiled_features", tiles, lengths.pop(), "features")
    pieces = zip(*(weight.tensor_split(tiles, dim) for weight, dim in weights), strict=True)
    if combine == "cat":
        return torch.cat([checkpoint(fn, x, *piece, **options) for piece in pieces], -1)
    first = checkpoint(fn, x, *next(pieces), **options)
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
    for piece in pieces:
        total = total + checkpoint(fn, x, *piece, **options)
    result: Tensor = total.to(first.dtype)
    return result


def _check(name: str, tiles: int, length: int, what: str) -> None:
    if not 1 <= tiles <= length:
        raise ValueError(f"{name}: tiles: expected 1 to the number of {what} ({length}), received {tiles}")

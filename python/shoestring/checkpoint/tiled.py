"""Compute layers tile by tile, if their intermediate tensors are too large for memory.

The method is memory-centric tiling (Rajbhandari et al., 2021; Bekman et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoestring.checkpoint.function import checkpoint
from shoestring.core.errors import InputError
from shoestring.core.presence import is_away


def tiled(fn: Callable[..., Tensor], x: Tensor, *, tiles: int, dim: int = -2, **options: Any) -> Tensor:
    """Compute ``fn(x)`` in tiles of ``x``, with only one tile's intermediate tensors in memory at a time.

    Backward, too, holds the intermediate tensors of only one tile. ``fn`` must treat the positions along
    ``dim`` independently, as an MLP treats tokens. The intermediate tensors of ``fn`` take 1 / ``tiles`` of
    their memory, at the cost of one more forward in backward. The result equals ``fn(x)`` except for
    rounding, since matrix products of other sizes round differently. Gradients of weights are sums over the
    tiles.

    Args:
        fn: takes a tile of ``x`` and returns a tile of the result with the same length along ``dim``.
        x: a tensor of any shape. No other tensor is kept for backward.
        tiles: the number of tiles, of about equal length; at most the length of ``x`` along ``dim``.
        dim: the dimension of ``x`` and of the result that is split; by default the tokens of (..., tokens,
            features).
        options: keyword arguments of :func:`checkpoint`.

    Returns:
        The tensor ``fn(x)``.

    Raises:
        ValueError: tiles is out of range, or ``fn`` returns a tensor with another length along ``dim`` than
            its tile.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(2, 16, 8)
        >>> y = shoestring.tiled(mlp, x, tiles=4)
        >>> torch.allclose(y, mlp(x), atol=1e-5)
        True
    """
    _check("tiled", tiles, x.shape[dim], "elements along dim")
    parts = []
    for tile in x.tensor_split(tiles, dim):
        part = checkpoint(fn, tile, **options)
        if part.shape[dim] != tile.shape[dim]:
            raise ValueError(
                f"tiled: fn: expected a result of {tile.shape[dim]} elements along dim {dim}, as its tile "
                f"has, received {part.shape[dim]}"
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
    """Compute ``fn(x, *weights)`` in tiles of the weights along their feature dimensions.

    Only one tile's intermediate tensors are in memory at a time. For example, this call tiles the inner
    features of an MLP: ``tiled_features(lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down), x, [(up,
    0), (down, 1)], tiles=4)``.

    Args:
        fn: takes ``x`` and a tile of each weight.
        x: a tensor of any shape, passed whole to every call of ``fn``.
        weights: pairs of a weight and its feature dimension. All weights have the same length along their
            feature dimensions.
        tiles: the number of tiles, of about equal length.
        combine: "sum" adds the results of the tiles (bf16 and fp16 in fp32, rounded once). "cat" concatenates
            the results along the last dimension, such as the output features of a linear layer.
        options: keyword arguments of :func:`checkpoint`.

    Returns:
        The tensor ``fn(x, *weights)``.

    Raises:
        ValueError: tiles is out of range, the lengths of the weights differ, ``combine`` is unknown, or a weight
            is away; :func:`tile_layers` splits layers whose weights are away.

    Example:
        >>> x, up, down = torch.randn(4, 8), torch.randn(32, 8), torch.randn(8, 32)
        >>> def mlp(x, up, down):
        ...     return torch.relu(x @ up.T) @ down.T
        >>> y = shoestring.tiled_features(mlp, x, [(up, 0), (down, 1)], tiles=4)
        >>> torch.allclose(y, mlp(x, up, down), atol=1e-3)
        True
    """
    if not torch.compiler.is_compiling() and any(is_away(weight) for weight, _ in weights):
        raise InputError(
            "tiled_features: weights: expected weights on their device, received one that is away. Split its layer by "
            "tile_layers, and call offload_weights after it, which brings the tiles one by one."
        )
    lengths = {weight.shape[dim] for weight, dim in weights}
    if len(lengths) != 1:
        raise ValueError(
            "tiled_features: weights: expected weights of the same size along their dims, received "
            f"{sorted(lengths)}"
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

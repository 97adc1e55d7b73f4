"""Experts as two grouped products with any function between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.experts.grouped_linear import grouped_linear
from shoestring.experts.moe_sort import moe_sort


def grouped_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Any,
    down: Any,
    gate: Callable[[Tensor], Tensor],
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return for each token the weighted sum of ``norm(gate(x @ up[e].T) @ down[e].T)`` over its experts e.

    Args:
        x, index, weight, transposed: as for :func:`moe_experts`.
        up: (experts, any, features), a tensor, or a stack with adapters. Adapters are multiplied by the tokens.
        down: (experts, features, hidden), likewise.
        gate: a function from the products with ``up``, (slots, any), to (slots, hidden).
        up_bias: (experts, any).
        down_bias: (experts, features).
        norm: a function of the products with ``down``, (slots, features); None for none.
    """
    if transposed:
        up, down = up.mT, down.mT
    order, inverse, offsets = moe_sort(index, up.shape[0])
    rows = order // index.shape[-1]
    h = gate(grouped_linear(x.reshape(-1, x.shape[-1]), up, offsets, rows=rows, bias=up_bias))
    y = grouped_linear(h, down, offsets, bias=down_bias)
    dtype = y.dtype
    if norm is not None:
        y = norm(y)
    scale = weight.masked_fill(index < 0, 0).unsqueeze(-1)
    return (y[inverse].view(*index.shape, -1) * scale).sum(-2).to(dtype)


def gated(h: Tensor, activation: str, limit: float | None, interleaved: bool) -> Tensor:
    """Return a gate of :func:`moe_experts` for its input h, (..., 2 hidden)."""
    g, u = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swigluoai":
        return g * torch.sigmoid(1.702 * g) * (u + 1)
    if activation == "silu":
        return F.silu(g) * u
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none") * u

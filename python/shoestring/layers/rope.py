"""Rotary position embedding of queries and keys, after a norm of each head where there is one."""

import torch
from torch import Tensor

from shoestring.layers.rms_norm import rms_norm_reference


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Turns pairs of each head's elements by their token's angles (RoFormer, arXiv 2104.09864).

    Queries and keys in one call, computed in fp32 (fp64 for fp64) and rounded once, wherever their strides put them: the
    transposes of (batch, tokens, heads, head_dim), or slices of fused projections, are not copied. The gradient is the
    rotation back, so backward keeps neither q nor k. With weights, RMSNorm of each head (as of Qwen 3's or Gemma 3's
    attention) goes before the rotation in the same pass, unrounded in between; backward then keeps q and k, nothing else.

    Args:
        q: (batch, heads, tokens, head_dim), or packed (tokens, heads, head_dim); fp32, fp64, bf16 or fp16.
        k: the same, with heads of its own.
        cos, sin: (tokens, width) or (1 or batch, tokens, width), of any floating-point dtype; with position_ids,
            (positions, width). width is rotary_dim / 2, or rotary_dim where each angle is there twice, as transformers has
            them: its halves are then taken for equal, or its neighbours if interleaved. They have no gradients.
        rotary_dim: how many elements are turned, the first ones; None: head_dim.
        interleaved: whether a pair are neighbours (GPT-J), or rotary_dim / 2 apart (GPT-NeoX, Llama).
        position_ids: (tokens) or (1 or batch, tokens) int64: each token's row of the tables. On a GPU, where nobody waits
            for its values, the tokens of one that is out of range become NaN; on the CPU that is an error.
        q_weight, k_weight: (head_dim), of any floating-point dtype: both or neither.
        eps, offset: of that norm, as in ``rms_norm``.

    Returns:
        New q and k, of their shapes, dtypes and order of strides. Differentiable once.

    Raises:
        RuntimeError: tables, positions or weights that do not go with q and k.
        IndexError: on the CPU, positions that the tables do not have.
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.rope(
        q,
        k,
        cos,
        sin,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        position_ids=position_ids,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        offset=offset,
    )
    return result


def rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    n = q.shape[-1] if rotary_dim is None else rotary_dim
    if cos.shape[-1] == n and n:
        cos, sin = (t[..., ::2] if interleaved else t[..., : n // 2] for t in (cos, sin))
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (t.unsqueeze(-2 if q.ndim == 3 else -3).to(q.dtype) for t in (cos, sin))

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = rms_norm_reference(x, weight, eps=eps, offset=offset, casting="gemma")
        part, rest = x[..., :n], x[..., n:]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        both = a * cos - b * sin, b * cos + a * sin
        return torch.cat(
            [torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest], -1
        )

    return turned(q, q_weight), turned(k, k_weight)

"""Rotary position embedding of queries and keys, optionally after RMSNorm of each head."""

import torch
from torch import Tensor

__all__ = ["rope"]


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
    """Rotate pairs of elements of each head by the angles of its token (RoFormer, arXiv 2104.09864).

    Queries and keys are rotated in one call, in fp32 (fp64 for fp64), and rounded once. Any strides are read
    without a copy, for example transposes of (batch, tokens, heads, head_dim) and slices of fused
    projections. Backward rotates the gradient in the opposite direction, so neither q nor k is saved.

    With q_weight and k_weight, RMSNorm of each head is computed before the rotation, as in the attention of
    Qwen 3 and Gemma 3. The norm is computed in the same pass as the rotation, without rounding in between.
    Only q and k are then saved for backward.

    Args:
        q: (batch, heads, tokens, head_dim), or packed (tokens, heads, head_dim); fp32, fp64, bf16 or fp16.
        k: like q; the number of heads may differ.
        cos, sin: (tokens, width) or (1 or batch, tokens, width), in any floating-point dtype; with
            position_ids (positions, width). width is rotary_dim / 2, or rotary_dim for tables that hold each
            angle twice, as in transformers. Tables that hold each angle twice are assumed to have two equal
            halves (equal neighbours if interleaved). cos and sin get no gradients.
        rotary_dim: the number of elements of a head, from the first, that are rotated. None: head_dim.
        interleaved: True if the elements of a pair are neighbours (GPT-J), False if they are rotary_dim / 2
            apart (GPT-NeoX, Llama).
        position_ids: (tokens) or (1 or batch, tokens), int64: the row of cos and sin for each token. On CUDA,
            where the host does not wait for these values, a token whose position is out of range becomes NaN;
            on the CPU it raises an IndexError.
        q_weight, k_weight: (head_dim), in any floating-point dtype: the weights of RMSNorm. Give q_weight and
            k_weight, or none of the two.
        eps, offset: of RMSNorm, as in ``rms_norm``.

    Returns:
        New q and k, with the shapes, dtypes and stride orders of the arguments. Differentiable once.

    Raises:
        RuntimeError: cos, sin, position_ids or the weights do not fit q and k.
        IndexError: on the CPU, a position that is not a row of cos and sin.

    Example:
        >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> angles = torch.outer(torch.arange(16), 10000 ** (-torch.arange(0, 64, 2) / 64))
        >>> q, k = shoestring.rope(q, k, angles.cos(), angles.sin())
        >>> q.shape, k.shape
        (torch.Size([1, 8, 16, 64]), torch.Size([1, 2, 16, 64]))
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

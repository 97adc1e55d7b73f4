"""Attention in plain PyTorch."""

import math

import torch
from torch import Tensor

from shoestring.attention.attention import AttentionResult


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionResult:
    """Compute :func:`attention` with ``return_lse`` in plain PyTorch, with all scores in memory.

    Args:
        keep: factors that multiply the attention weights, (batch, heads, queries, keys); given instead of
            dropout_p.
        bias: has at most as many dimensions as q; packed, it has three.

    The other arguments are those of :func:`attention`.
    """
    if cu_seqlens_q is not None:
        starts_q = cu_seqlens_q.tolist()
        starts_k = starts_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
        parts = []
        for i, (b, e, bk, ek) in enumerate(zip(starts_q, starts_q[1:], starts_k, starts_k[1:])):
            rows = None
            if bias is not None:
                rows = bias if bias.size(1) == 1 else bias[:, b:e]
                rows = (rows if bias.size(2) == 1 else rows[..., : ek - bk])[None]
            parts.append(
                attention_reference(
                    *(t.transpose(0, 1)[None] for t in (q[b:e], k[bk:ek], v[bk:ek])),
                    causal=causal,
                    window_size=window_size,
                    softcap=softcap,
                    scale=scale,
                    bias=rows,
                    alibi_slopes=alibi_slopes[i]
                    if alibi_slopes is not None and alibi_slopes.dim() == 2
                    else alibi_slopes,
                    sinks=sinks,
                )
            )
        out = torch.cat([part.out[0].transpose(0, 1) for part in parts])
        return AttentionResult(out, torch.cat([part.lse[0] for part in parts], dim=1))
    queries, keys, heads = q.size(-2), k.size(-2), q.size(-3) if q.dim() > 2 else 1
    k, v = (
        t.repeat_interleave(heads // t.size(-3), -3) if t.dim() > 2 and t.size(-3) < heads else t
        for t in (k, v)
    )
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    here = torch.arange(queries, device=q.device)[:, None] + keys - queries
    distance = torch.arange(keys, device=q.device) - here
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance.abs()
    left, right = window_size or (-1, -1)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if causal or right >= 0:
        scores = scores.masked_fill(distance > (0 if causal else right), -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    blind = (lse == -math.inf)[..., None]  # queries that see no key
    scores = scores.masked_fill(blind, 0)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    p = scores.softmax(-1)[..., :keys].masked_fill(blind, 0)
    return AttentionResult((p if keep is None else p * keep).to(v.dtype) @ v, lse)

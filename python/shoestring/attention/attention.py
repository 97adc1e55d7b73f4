"""Attention whose memory is linear in tokens, with every option on every path."""

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor


class AttentionResult(NamedTuple):
    """What :func:`attention` returns with ``return_lse=True``."""

    out: Tensor
    lse: Tensor


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[True],
) -> AttentionResult: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool,
) -> Tensor | AttentionResult: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | AttentionResult:
    """``softmax(scale * q @ k.T) @ v`` for every head, a block at a time: scores never exist as a whole.

    Backward computes them again from what is kept: inputs, output and one number for each query. Sums are fp32 (fp64
    for fp64), results are bitwise repeatable (see ``deterministic``) and do not depend on the number of threads. On CUDA nothing
    waits for the GPU; it takes compute capability 8.0 or more and at most 256 features, and fp32 has the 22 bits of two
    TF32 numbers.

    Args:
        q: (batch, heads, tokens, head_dim), fp32, bf16, fp16 or, on the CPU, fp64, with any strides. With
            ``cu_seqlens_q`` packed: (tokens of all sequences, heads, head_dim).
        k: (batch, kv heads, keys, head_dim), of q's dtype; heads must be a multiple of kv heads (grouped queries). Packed: (keys of all
            sequences, kv heads, head_dim).
        v: (batch, kv heads, keys, value_dim), which may differ from head_dim.
        causal: each query sees keys up to its own. Where there are fewer queries than keys, or more, the last query and the
            last key are the same token.
        window: how many keys to the left and to the right of its own a query sees, aligned in the same way; -1: all.
            A sliding window of ``w`` tokens is ``causal=True, window=(w - 1, -1)``.
        softcap: above 0: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.
        scale: default ``1 / sqrt(head_dim)``.
        bias: added to the scores after the cap; (batch, heads, queries, keys), any of them 1; fp32, bf16, fp16, with -inf where
            a key is not to be seen, or bool, true where it is. Packed: (heads, queries of all sequences, keys of the
            longest), the first two of them possibly 1. Differentiable.
        alibi_slopes: (heads) or (batch, heads): ``slope * |i - j|`` is subtracted from the scores. No gradient.
        sinks: (heads): the score of one more key, whose value is zero, as in gpt-oss. Differentiable.
        cu_seqlens_q: (sequences + 1) int32, where sequences begin and the last one ends, on q's device. Nothing reads it on the host.
        cu_seqlens_k: the same of the keys; default ``cu_seqlens_q``.
        dropout_p: the probability with which a probability is dropped, in [0, 1), to 1 / 65536; others are divided by ``1 - p``.
        seed: one int64 on q's device, with ``dropout_p`` only. The mask is a function of it and the place, made again in backward.
        deterministic: True: the same bits in each run. Otherwise a call on CUDA goes to PyTorch's cuDNN or flash operator where
            PyTorch would take it and it does the same: bf16 or fp16, no option but ``scale`` and ``causal`` (that with equal
            lengths). Their backward adds up in any order. None: ``torch.are_deterministic_algorithms_enabled()``.
        return_lse: return ``(out, lse)``.

    Returns:
        (batch, heads, tokens, value_dim), or packed (tokens, heads, value_dim), of q's dtype, its dimensions in memory as
        q's; 0 where a query sees no key. With ``return_lse`` an :class:`AttentionResult`, whose ``lse`` is the
        log-sum-exp of the scores, sink included, (batch, heads, tokens), or packed (heads, tokens), fp32 (fp64 for fp64),
        -inf where a query sees nothing. Both are differentiable, once, by q, k, v, bias and sinks.

    Raises:
        RuntimeError: a shape, dtype or option that does not fit.

    FlashAttention's algorithm (Dao et al., arXiv 2205.14135; Dao, arXiv 2307.08691). On the CPU scores are kept with queries side by
    side in a register, so that a row's maximum and sum need no shuffles and probabilities lie as the next product reads them.
    """
    arguments = (q, k, v, bias, sinks)
    options = {
        "causal": causal,
        "window": list(window) if window is not None else [-1, -1],
        "softcap": softcap,
        "scale": scale,
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "dropout_p": dropout_p,
        "seed": seed,
        "deterministic": deterministic,
    }
    if return_lse:
        return AttentionResult(*torch.ops.shoestring.attention_with_lse(*arguments, **options))
    result: Tensor = torch.ops.shoestring.attention(*arguments, **options)
    return result


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionResult:
    """:func:`attention` with ``return_lse`` in plain PyTorch, with all scores in memory.

    ``keep``, in place of dropout: what probabilities are multiplied by, (batch, heads, queries, keys).
    """
    if cu_seqlens_q is not None:
        starts_q = cu_seqlens_q.tolist()
        starts_k = starts_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
        parts = []
        for b, e, bk, ek in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
            rows = None
            if bias is not None:
                rows = bias if bias.size(1) == 1 else bias[:, b:e]
                rows = (rows if bias.size(2) == 1 else rows[..., : ek - bk])[None]
            parts.append(
                attention_reference(
                    *(t.transpose(0, 1)[None] for t in (q[b:e], k[bk:ek], v[bk:ek])),
                    causal=causal,
                    window=window,
                    softcap=softcap,
                    scale=scale,
                    bias=rows,
                    alibi_slopes=alibi_slopes,
                    sinks=sinks,
                )
            )
        out = torch.cat([part.out[0].transpose(0, 1) for part in parts])
        return AttentionResult(out, torch.cat([part.lse[0] for part in parts], dim=1))
    queries, keys, heads = q.size(2), k.size(2), q.size(1)
    k, v = (t.repeat_interleave(heads // t.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    here = torch.arange(queries, device=q.device)[:, None] + keys - queries
    distance = torch.arange(keys, device=q.device) - here
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance.abs()
    left, right = window or (-1, -1)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if causal or right >= 0:
        scores = scores.masked_fill(distance > (0 if causal else right), -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return AttentionResult((p if keep is None else p * keep).to(v.dtype) @ v, lse)

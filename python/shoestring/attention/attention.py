"""Attention with memory linear in the number of tokens. Its options can be combined, on CPU and CUDA."""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

__all__ = ["AttentionResult", "attention"]


class AttentionResult(NamedTuple):
    """The result of :func:`attention` with ``return_lse=True``.

    out: the output of attention.
    lse: the log-sum-exp of the scores of each query.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 16, 32)
        >>> result = shoestring.attention(q, k, v, return_lse=True)
        >>> result.out.shape, result.lse.shape
        (torch.Size([1, 2, 16, 32]), torch.Size([1, 2, 16]))
    """

    out: Tensor
    lse: Tensor


@overload
def attention(
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
    window_size: tuple[int, int] | None = None,
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
    window_size: tuple[int, int] | None = None,
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
    window_size: tuple[int, int] | None = None,
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
    """Compute ``softmax(scale * q @ k.T) @ v`` for every head, one block of scores at a time.

    The whole matrix of scores is never in memory. The inputs, the output and one number per query are saved
    for backward, which computes the scores again. Sums are fp32 (fp64 for fp64 inputs). Results are bitwise
    repeatable (see ``deterministic``) and do not depend on the number of threads.

    CUDA needs compute capability 8.0 or higher, and a head_dim and value_dim of at most 256. The host never
    waits for the GPU. fp32 inputs are multiplied with 22 bits of precision, as sums of two TF32 numbers.

    Shapes are those of ``torch.nn.functional.scaled_dot_product_attention``. Three dimensions are (heads,
    tokens, features), two are (tokens, features), and of five or more the leading ones are one batch. Sizes in
    front of the tokens broadcast, and gradients are summed as PyTorch does. A broadcast tensor is read without
    a copy, but its gradient takes the memory of the whole batch before the sum. With five or more dimensions, a
    tensor is copied if its leading dimensions have no common stride, such as one that is expanded along some
    of them.

    Args:
        q: (batch, heads, tokens, head_dim), fp32, bf16, fp16 or, on the CPU, fp64, with any strides. With
            ``cu_seqlens_q`` packed: (tokens of all sequences, heads, head_dim).
        k: (batch, kv heads, keys, head_dim), in the dtype of q. heads must be a multiple of kv heads
            (grouped-query attention). Packed: (keys of all sequences, kv heads, head_dim).
        v: (batch, kv heads, keys, value_dim), or packed like k; value_dim may differ from head_dim.
        causal: True if a query attends only to keys up to its own position. If the numbers of queries and
            keys differ, the last query and the last key have the same position.
        window_size: numbers of keys to the left and to the right of its own position that a query attends to,
            aligned as for ``causal``; -1 is no limit. A sliding window of ``w`` tokens is ``causal=True,
            window_size=(w - 1, -1)``.
        softcap: if above 0, scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.
        scale: default ``1 / sqrt(head_dim)``.
        bias: added to the scores after ``softcap``, (batch, heads, queries, keys). Each dimension may be 1,
            and leading ones may be missing, as in a mask (queries, keys). fp32, bf16 or fp16, with -inf for
            masked keys; or bool, False for masked keys. Packed: (heads, queries of all sequences, keys of the
            longest sequence), where the first two dimensions may be 1. Differentiable.
        alibi_slopes: (heads), (batch, heads) or, packed, (sequences, heads): ``slope * |i - j|`` is
            subtracted from the score of query i and key j. Not differentiable.
        sinks: (heads): the score of one additional key with the value zero, as in gpt-oss. Differentiable.
        cu_seqlens_q: (sequences + 1), int32, on the device of q: the index of the first query of each
            sequence, and the end of the last sequence. The host does not read it.
        cu_seqlens_k: the corresponding indices of the keys; default ``cu_seqlens_q``.
        dropout_p: probability, in [0, 1), that an attention weight is dropped, rounded to a multiple of 1 /
            65536. The other weights are divided by ``1 - dropout_p``.
        seed: one int64 on the device of q; only with ``dropout_p``. The mask is a function of the seed and
            the position of an attention weight. Backward computes it again.
        deterministic: True guarantees the same bits in each run. False permits a call on CUDA to use
            PyTorch's cuDNN or flash operator, whose backward sums in varying order. This happens where
            PyTorch would choose that operator: bf16 or fp16, and no options but ``scale`` and, for equal
            lengths, ``causal``. None: ``torch.are_deterministic_algorithms_enabled()``.
        return_lse: whether to return ``(out, lse)``.

    Returns:
        (batch, heads, tokens, value_dim), or packed (tokens, heads, value_dim), in the dtype and the
        dimension order in memory of q. Rows of queries that attend to no key are 0. With ``return_lse`` an
        :class:`AttentionResult`. Its ``lse`` is the log-sum-exp of the scores including the sink, and -inf
        for queries without keys. It is (batch, heads, tokens), or packed (heads, tokens), in fp32 (fp64 for
        fp64 inputs). Inputs of other dimensions give results of the same dimensions. The output and ``lse`` are differentiable once with respect to q, k, v, bias and sinks.

    Raises:
        RuntimeError: a shape, dtype or option does not fit.

    Example:
        >>> q = torch.randn(1, 8, 128, 64)
        >>> k, v = torch.randn(2, 1, 2, 128, 64)
        >>> shoestring.attention(q, k, v, causal=True).shape
        torch.Size([1, 8, 128, 64])
        >>> mask = torch.ones(128, 128, dtype=torch.bool).tril()
        >>> shoestring.attention(q[0], k[0], v[0], bias=mask).shape
        torch.Size([8, 128, 64])
        >>> q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))  # packed: (tokens, heads, head_dim)
        >>> cu_seqlens = torch.tensor([0, 48, 128], dtype=torch.int32)  # two sequences
        >>> shoestring.attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens).shape
        torch.Size([128, 8, 64])

    The algorithm is FlashAttention (Dao et al., arXiv 2205.14135; Dao, arXiv 2307.08691). On the CPU, a
    vector register holds the scores of several queries for one key. The maximum and sum of a row thus need no
    shuffles, and the probabilities are already in the layout that the product with v reads.
    """
    arguments = (q, k, v, bias, sinks)
    options = {
        "causal": causal,
        "window_size": list(window_size) if window_size is not None else [-1, -1],
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

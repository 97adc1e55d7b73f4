"""Embeddings whose backward writes the dense gradient of the weight in one pass."""

import torch
from torch import Tensor

__all__ = ["embedding"]


def embedding(
    ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, scale_grad_by_freq: bool = False
) -> Tensor:
    """Look up rows of a weight, as ``torch.nn.functional.embedding`` does.

    On the CPU, backward sorts the ids and writes each row of the dense gradient once: zeros, or the sum of
    the row's gradients, in fp32 (fp64 for fp64) and rounded once. PyTorch fills the gradient with zeros
    first. The result is the same bit for bit on any number of threads. On CUDA, PyTorch's operators compute
    both passes.

    Args:
        ids: any shape, int64 or int32.
        weight: (rows, features), fp32, fp64, bf16 or fp16.
        padding_idx: index of a row that gets no gradient. A negative index counts from the end.
        scale_grad_by_freq: divides the gradient of a row by the number of its ids.

    Returns:
        (..., features) for ids (...), in the dtype of the weight. Differentiable, also twice.

    Raises:
        IndexError: on the CPU, an id is no row of the weight.
        RuntimeError: a shape, dtype or device does not fit, or ``padding_idx`` is no row of the weight.

    Example:
        >>> table = torch.nn.Embedding(100, 16)
        >>> ids = torch.tensor([[3, 7, 3]])
        >>> torch.equal(shoestring.embedding(ids, table.weight), table(ids))
        True
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    result: Tensor = torch.ops.shoestring.embedding(
        ids, weight, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq
    )
    return result

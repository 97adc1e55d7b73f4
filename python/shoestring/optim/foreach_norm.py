"""L2 norms of many tensors in one call, for gradient clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["foreach_norm"]


def foreach_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, like ``torch._foreach_norm(tensors, dtype=torch.float32)``.

    The host does not wait for the result. On the CPU every tensor is read once, in its own dtype, with SIMD
    instructions. (PyTorch processes one bf16 element at a time if the result is fp32.) The norm of a tensor
    has the same bits for any number of threads and for any other tensors in the list. Squares are summed in
    fp32 within blocks of 8192 elements, and in fp64 across blocks.

    Args:
        tensors: a list of n tensors, at least one, on one device, of any shapes; fp32, bf16 or fp16 in any
            mixture.

    Returns:
        The norms, (n,), fp32. They have no gradient.

    Raises:
        RuntimeError: the list is empty, or a tensor has an unsupported dtype or layout, or another device.

    Example:
        >>> grads = [torch.ones(4), torch.ones(3, 3, dtype=torch.bfloat16)]
        >>> shoestring.ops.foreach_norm(grads)
        tensor([2., 3.])
    """
    if not tensors:  # PyTorch cannot select a backend for an operator call without a tensor
        raise RuntimeError("foreach_norm: tensors: expected at least one tensor, received none")
    result: Tensor = torch.ops.shoestring.foreach_norm(tensors)
    return result

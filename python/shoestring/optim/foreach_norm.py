"""The norms that gradients are clipped by."""

from collections.abc import Sequence

import torch
from torch import Tensor


def foreach_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each of n tensors, as ``torch._foreach_norm(tensors, dtype=torch.float32)``; nothing waits for it.

    On the CPU every tensor is read once, in its own type (PyTorch takes a bf16 element at a time where the result is
    fp32); a norm's bits depend neither on the number of threads nor on the other tensors. Squares are added in fp32 within
    8192 elements and in fp64 beyond.

    Args:
        tensors: at least one, on one device, of any shapes; fp32, bf16 or fp16 in any mixture.

    Returns:
        fp32, (n,). It has no gradient.

    Raises:
        RuntimeError: no tensor, or one of another dtype, layout or device.
    """
    if not tensors:  # which PyTorch could not dispatch
        raise RuntimeError("foreach_norm: tensors: expected at least one tensor, received none")
    result: Tensor = torch.ops.shoestring.foreach_norm(tensors)
    return result


def foreach_norm_reference(tensors: Sequence[Tensor]) -> Tensor:
    """``foreach_norm`` in plain PyTorch, in fp64 but for the result."""
    return torch.stack([t.double().square().sum() for t in tensors]).sqrt().float()

"""The norm that gradients are clipped by."""

from collections.abc import Sequence

import torch
from torch import Tensor


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of all tensors together, as ``torch.nn.utils.get_total_norm``; nothing waits for it.

    On the CPU every tensor is read once, in its own type (PyTorch takes a bf16 element at a time where the result is
    fp32); any number of threads gives the same bits. Squares are added in fp32 within 8192 elements and in fp64 beyond.

    Args:
        grads: at least one, on one device, of any shapes; fp32, bf16 or fp16 in any mixture.

    Returns:
        fp32, of shape (). It has no gradient.

    Raises:
        RuntimeError: no tensor, or one of another dtype, layout or device.
    """
    if not grads:  # which PyTorch could not dispatch
        raise RuntimeError("total_norm: grads: expected at least one tensor, received none")
    return torch.ops.shoestring.total_norm(grads)


def total_norm_reference(grads: Sequence[Tensor]) -> Tensor:
    """``total_norm`` in plain PyTorch, in fp64 but for the result."""
    return torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().float()

"""Layer normalisation."""

import torch
from torch import Tensor
from torch.nn import functional as F


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (arXiv 1607.06450).

    One pass over x forward, one over x and the gradient backward, for every gradient. Computed in fp32 (fp64 for fp64)
    and rounded once; sums are bitwise repeatable, also with other numbers of threads. Backward keeps x and two fp32 a row.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        weight, bias: (features), each of any floating-point dtype.
        eps: added to the variance.

    Returns:
        x's shape and dtype. Differentiable once.

    Raises:
        RuntimeError: a weight or bias that does not go with x.
    """
    result: Tensor = torch.ops.shoestring.layer_norm(x, weight, bias, eps=eps)
    return result


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> Tensor:
    """The same in plain PyTorch."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    weight, bias = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)

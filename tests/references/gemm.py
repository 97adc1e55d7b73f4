"""Matrix products in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def addmm_reference(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return the value of self after ``addmm_``, computed in fp64 and rounded to the dtype of self."""
    product = alpha * (mat1.double() @ mat2.double())
    return (product if beta == 0 else beta * self.double() + product).to(self.dtype)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``linear`` in plain PyTorch."""
    dtype = dtype or x.dtype
    y = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return y if residual is None else residual + y

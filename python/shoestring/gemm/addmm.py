"""Matrix products that are added to an accumulator, which may be fp32 while the matrices are bf16 or fp16."""

import torch
from torch import Tensor

__all__ = ["addmm_"]


def addmm_(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """Compute ``self = beta * self + alpha * mat1 @ mat2`` in place; self may be fp32 for 16-bit matrices.

    For example, ``addmm_(weight.main_grad, grad_output.T, x)`` adds the gradient of a weight to an fp32
    ``main_grad``. The other operators of this package use the same GEMM. On CPUs with AVX2 or AVX-512, the
    GEMM is part of this package. It converts 16-bit matrices to fp32 while it packs them into cache, and its
    result does not depend on the number of threads. On other CPUs and on GPUs, the GEMM is that of PyTorch's
    BLAS library.

    Args:
        self: (m, n), in the dtype of the matrices, or fp32 if they are bf16 or fp16. If beta is 0, self is
            not read.
        mat1: (m, k), fp32, fp64, bf16 or fp16. Strided rows or columns are read without a copy, so transposed
            views are efficient.
        mat2: (k, n), in the dtype of mat1.

    The operator is not differentiable.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Example:
        >>> x = torch.ones(16, 4, dtype=torch.bfloat16)
        >>> grad_output = torch.ones(16, 8, dtype=torch.bfloat16)
        >>> main_grad = torch.zeros(8, 4)
        >>> shoestring.ops.addmm_(main_grad, grad_output.T, x)
        >>> torch.equal(main_grad, torch.full((8, 4), 16.0))
        True
    """
    torch.ops.shoestring.addmm_(self, mat1, mat2, beta=beta, alpha=alpha)

"""Products of matrices that are added in fp32."""

import torch
from torch import Tensor


def addmm_(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """``self = beta * self + alpha * mat1 @ mat2``, where self may be fp32 and the matrices bf16 or fp16.

    A weight's gradient, say, into an fp32 ``main_grad``: ``addmm_(weight.main_grad, grad_output.T, x)``. It is what the
    package's own operators multiply with. On CPUs with AVX2 or AVX-512 the product is the package's own (16-bit matrices
    are widened on their way into cache, and the result does not depend on the number of threads), elsewhere the
    library's that PyTorch uses.

    Args:
        self: (m, n), the matrices' dtype, or fp32 for bf16 and fp16. Not read where beta is 0.
        mat1: (m, k), fp32, fp64, bf16 or fp16. Rows or columns may be apart: transposed views are read as they lie.
        mat2: (k, n), mat1's dtype.

    Not differentiable.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit.
    """
    torch.ops.shoestring.addmm_(self, mat1, mat2, beta=beta, alpha=alpha)


def addmm_reference(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """What ``addmm_`` makes of self, in fp64."""
    product = alpha * (mat1.double() @ mat2.double())
    return (product if beta == 0 else beta * self.double() + product).to(self.dtype)

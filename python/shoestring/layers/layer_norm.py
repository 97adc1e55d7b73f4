"""Layer normalisation, alone or with the addition of a residual in the same pass."""

import torch
from torch import Tensor

__all__ = ["add_layer_norm", "layer_norm"]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension.

    The method is layer normalisation (arXiv 1607.06450).

    Forward reads x once. Backward reads x and the upstream gradient once and computes all gradients. For
    that, x and two fp32 numbers per row are saved. The computation is in fp32 (fp64 for fp64) and rounded
    once. Results are bitwise repeatable and do not depend on the number of threads.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        weight, bias: (features), each in any floating-point dtype. None: no multiplication, no addition.
        eps: added to the variance.
        out_dtype: dtype of the result: bf16 or fp16 for fp32 x. A linear layer under autocast takes such a
            result as it is, and gives the same bits. None: the dtype of x.

    Returns:
        The shape of x, in out_dtype. Differentiable once.

    Raises:
        RuntimeError: the shape, dtype or device of weight or bias, or out_dtype, does not fit x.

    Example:
        >>> x, weight, bias = torch.randn(16, 64), torch.ones(64), torch.zeros(64)
        >>> y = shoestring.layer_norm(x, weight, bias, eps=1e-5)
        >>> expected = torch.nn.functional.layer_norm(x, (64,), weight, bias, eps=1e-5)
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """
    result: Tensor = torch.ops.shoestring.layer_norm(x, weight, bias, eps=eps, out_dtype=out_dtype)
    return result


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(layer_norm(x + residual), x + residual)`` in one pass forward and one pass backward.

    ``x + residual`` is rounded to the dtype of the residual. Both results have an upstream gradient. Backward computes
    the gradient of the norm and adds the upstream gradient of ``x + residual`` in the same pass.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        residual: like x. If x is 16-bit, the residual may be fp32, as under autocast.
        weight, bias, eps: as in ``layer_norm``.
        out_dtype: as in ``layer_norm``, for rows of the residual's dtype. A 16-bit x must have this dtype.

    Returns:
        Two tensors with the shape of x: the normalised ``x + residual`` in out_dtype, and ``x + residual`` in
        the dtype of the residual.

    Raises:
        RuntimeError: weight, bias, residual or out_dtype does not fit x.

    Example:
        >>> x, residual = torch.randn(2, 16, 64)
        >>> normed, total = shoestring.add_layer_norm(x, residual, torch.ones(64), torch.zeros(64), eps=1e-12)
        >>> normed.shape, torch.equal(total, x + residual)
        (torch.Size([16, 64]), True)
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.add_layer_norm(
        x, residual, weight, bias, eps=eps, out_dtype=out_dtype
    )
    return result

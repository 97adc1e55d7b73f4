"""Root-mean-square normalisation, alone or with the addition of a residual in the same pass."""

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    upcast: str = "llama",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension (arXiv 1910.07467).

    Forward reads x once. Backward reads x and the upstream gradient once and computes all gradients. For
    that, x and one fp32 number per row are saved. Sums are fp32 (fp64 for fp64). Results are bitwise
    repeatable and do not depend on the number of threads.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        weight: (features), in any floating-point dtype, for example fp32 for bf16 x. None: rows are not
            multiplied by a weight, and offset is not used.
        eps: added to the mean of squares.
        offset: added to the weight; 1 for Gemma.
        upcast: which intermediate results are rounded to the dtype of a 16-bit x before the last
            multiplication. "llama" (Llama, Qwen and Mistral in transformers): the normalised row. "gemma"
            (Gemma and ``torch.nn.functional.rms_norm``): none of them. "none": the reciprocal root, the
            normalised row and the weight, as in code without casts. Gradients do not depend on upcast: they
            are the gradients of the function without intermediate rounding, rounded once.
        out_dtype: dtype of the result: bf16 or fp16 for fp32 x. A linear layer under autocast takes such a
            result as it is, and gives the same bits. None: the dtype of x.

    Returns:
        The shape of x, in out_dtype. Differentiable once.

    Raises:
        RuntimeError: weight or out_dtype does not fit x, or upcast is unknown.

    Example:
        >>> x, weight = torch.randn(16, 64), torch.ones(64)
        >>> y = shoestring.rms_norm(x, weight, eps=1e-6)
        >>> expected = torch.nn.functional.rms_norm(x, (64,), weight, eps=1e-6)
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """
    result: Tensor = torch.ops.shoestring.rms_norm(
        x, weight, eps=eps, offset=offset, upcast=upcast, out_dtype=out_dtype
    )
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    upcast: str = "llama",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(rms_norm(x + residual), x + residual)`` in one pass forward and one pass backward.

    ``x + residual`` is rounded to the dtype of the residual. Both results have an upstream gradient. Backward computes
    the gradient of the norm and adds the upstream gradient of ``x + residual`` in the same pass.

    Args:
        x, residual: (..., features), with the same dtype. x may also have out_dtype while the residual is
            fp32, as in a model under autocast.
        weight, eps, offset, upcast, out_dtype: as in ``rms_norm``, for rows of the residual's dtype.

    Returns:
        Two tensors with the shape of x: the normalised ``x + residual`` in out_dtype, and ``x + residual`` in
        the dtype of the residual.

    Raises:
        RuntimeError: weight, residual or out_dtype does not fit x, or upcast is unknown.

    Example:
        >>> x, residual = torch.randn(2, 16, 64)
        >>> normed, total = shoestring.add_rms_norm(x, residual, torch.ones(64), eps=1e-6)
        >>> normed.shape, torch.equal(total, x + residual)
        (torch.Size([16, 64]), True)
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.add_rms_norm(
        x, residual, weight, eps=eps, offset=offset, upcast=upcast, out_dtype=out_dtype
    )
    return result

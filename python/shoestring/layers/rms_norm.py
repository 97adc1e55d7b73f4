"""Root-mean-square normalisation, with the residual's sum in the same pass."""

from typing import overload

import torch
from torch import Tensor


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor | tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension (arXiv 1910.07467).

    One pass over x forward, one over x and the gradient backward, for every gradient; sums are fp32 (fp64 for fp64), and
    bitwise repeatable, also with other numbers of threads. Backward keeps what was normalised, and an fp32 a row.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        weight: (features), of any floating-point dtype: fp32 with bf16 x, say; None is all ones without an offset.
        eps: added to the mean of squares.
        residual: of x's shape and dtype: ``x + residual``, rounded to their dtype, is normalised, and returned too. The
            same as ``add_rms_norm``, which always returns both.
        offset: added to the weight; Gemma's is 1.
        casting: what 16-bit x is rounded to before the last multiplication: "llama" (as Llama, Qwen, Mistral in
            transformers): the normalised row; "gemma" (Gemma, ``torch.nn.functional.rms_norm``): nothing; "none": the
            reciprocal root, the normalised row and the weight, as in code without casts. Gradients do not depend on it:
            they are the exact function's, rounded once.

    Returns:
        x's shape and dtype; with a residual, that and the sum. Differentiable once.

    Raises:
        RuntimeError: a weight or residual that does not go with x, or an unknown casting.
    """
    if residual is not None:
        return add_rms_norm(x, residual, weight, eps=eps, offset=offset, casting=casting)
    result: Tensor = torch.ops.shoestring.rms_norm(x, weight, eps=eps, offset=offset, casting=casting)
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)`` in one pass each way; see ``rms_norm``.

    Backward adds the sum's own gradient in the pass that makes the other.

    Args:
        x, residual: (..., features), of one dtype.
        weight, eps, offset, casting: as in ``rms_norm``.

    Returns:
        The normalised sum and the sum, both of x's shape and dtype.
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.add_rms_norm(
        x, residual, weight, eps=eps, offset=offset, casting=casting
    )
    return result


@overload
def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor: ...
@overload
def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor | tuple[Tensor, Tensor]: ...
def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    if residual is not None:
        total = x + residual
        return rms_norm_reference(total, weight, eps=eps, offset=offset, casting=casting), total
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    row = wide * rstd
    if casting == "none":
        row = x * rstd.to(x.dtype)
    if casting == "llama":
        row = row.to(x.dtype).to(wide.dtype)
    if weight is None:
        return row.to(x.dtype)
    factor = weight.to(wide.dtype) + offset
    return (row * (factor.to(x.dtype) if casting == "none" else factor)).to(x.dtype)

"""Linear layers with trainable weights: one, or several that read the same input."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = ["linear", "linear_group"]

# The products of a linear layer: its output, and the gradients of its input and of its weight.
PRODUCTS = ("forward", "grad_x", "grad_weight")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    library: Collection[str] = (),
) -> Tensor:
    """Compute ``x @ weight.T + bias + residual``, as ``torch.nn.functional.linear`` does.

    With ``dtype``, the operands are rounded to this dtype before they are multiplied, with sums in fp32.
    Autocast sets ``dtype``. x and the weight keep their dtypes: no rounded copy of the weight is kept until
    backward, and backward computes the gradients of x and of the weight in the dtypes of x and of the weight.
    x is saved once, rounded to ``dtype``.

    Args:
        x: (..., in_features), fp32, fp64, bf16 or fp16.
        weight: (out_features, in_features), in the dtype of x, or in any of these dtypes if ``dtype`` is
            given.
        bias: (out_features), like the weight.
        residual: (..., out_features), a tensor that is added to the result in the same product. If its dtype
            is wider than ``dtype``, the result has the dtype of the residual.
        dtype: dtype of the product. None: the dtype of x.
        library: which of "forward", "grad_x" and "grad_weight" the BLAS library of PyTorch computes on the
            CPU. This package computes the others. Which is faster depends on the CPU and on the shapes; see
            ``shoestring.patch``, which measures it. The results differ within rounding. A product that the
            library computes in bf16 and adds to an fp32 tensor is rounded to bf16 first. On CUDA, cuBLAS
            computes all products.

    Returns:
        (..., out_features). Differentiable, also twice.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.
        ValueError: ``library`` has an unknown name.

    Example:
        >>> layer = torch.nn.Linear(64, 32)
        >>> x, residual = torch.randn(16, 64), torch.randn(16, 32)
        >>> y = shoestring.linear(x, layer.weight, layer.bias, residual=residual)
        >>> torch.allclose(y, layer(x) + residual, atol=1e-5)
        True
    """
    result: Tensor = torch.ops.shoestring.linear(
        x, weight, bias, residual=residual, dtype=dtype, library=library_sum("linear", library)
    )
    return result


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    *,
    dtype: torch.dtype | None = None,
    library: Collection[str] = (),
) -> list[Tensor]:
    """Compute ``x @ weight.T + bias`` for several weights, for example those of query, key and value.

    x is rounded and saved once for all layers. Backward adds each layer's gradient of x to one tensor while
    it multiplies, so autograd adds no gradients.

    Args:
        x: (..., in_features).
        weights: (out_features, in_features) for each layer; the numbers of out_features may differ.
        biases: none, or for each layer a bias (out_features) or None.
        dtype, library: as in :func:`linear`.

    Returns:
        For each layer, (..., out_features). Differentiable, also twice.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.
        ValueError: ``library`` has an unknown name.

    Example:
        >>> x, q, k = torch.randn(16, 64), torch.randn(64, 64), torch.randn(32, 64)
        >>> [tuple(y.shape) for y in shoestring.linear_group(x, [q, k])]
        [(16, 64), (16, 32)]
    """
    result: list[Tensor] = torch.ops.shoestring.linear_group(
        x, weights, biases, dtype=dtype, library=library_sum("linear_group", library)
    )
    return result


def library_sum(op: str, library: Collection[str]) -> int:
    """Return the argument ``library`` of the operators: bit i is set if ``library`` names ``PRODUCTS[i]``."""
    if not set(library) <= set(PRODUCTS) or isinstance(library, str):
        raise ValueError(f"{op}: library: expected names out of {', '.join(PRODUCTS)}, received {library!r}")
    return sum(1 << i for i, name in enumerate(PRODUCTS) if name in library)

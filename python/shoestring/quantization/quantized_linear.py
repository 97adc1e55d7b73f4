"""A linear layer over a frozen quantised weight, as a function."""

import torch
from torch import Tensor

from shoestring.quantization.quantized_tensor import QuantizedTensor

__all__ = ["quantized_linear"]


def quantized_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for a frozen quantised weight.

    The weight is dequantised one panel of rows at a time, so the dense weight is never in memory as a whole.

    Args:
        x: (..., in_features); fp32, fp64, bf16 or fp16. The CPU multiplies in fp32 (fp64 for fp64) and rounds
            the result once. A CPU with bf16 matrix units multiplies bf16 input in bf16.
        weight: (out_features, in_features), from ``shoestring.quantize_4bit`` or ``quantize_int8``.
        bias: (out_features), any floating-point dtype.

    Returns:
        (..., out_features), in the dtype of x. Bitwise repeatable. Differentiable once with respect to x and
        bias; x is not saved for backward.

    Raises:
        RuntimeError: a shape or dtype does not fit.

    Example:
        >>> x, weight = torch.randn(4, 256), shoestring.quantize_4bit(torch.randn(64, 256))
        >>> y = shoestring.quantized_linear(x, weight)
        >>> torch.allclose(y, x @ weight.dequantize().T, atol=1e-3)
        True
    """
    result: Tensor = torch.ops.shoestring.quantized_linear(
        x,
        weight.packed,
        weight.absmax,
        weight.nested,
        bias,
        out_features=weight.shape[0],
        quant_type=weight.quant_type,
        block_size=weight.block_size,
    )
    return result

"""A linear layer's product with a quantised weight."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.quantization.quantized_tensor import QuantizedTensor


def quantized_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for a frozen quantised weight, which is dequantised a panel of rows at a time, never whole.

    Args:
        x: (..., in_features); fp32, fp64, bf16 or fp16. On the CPU products are fp32 (fp64 for
            fp64) and rounded once, but bf16 where the CPU has units for that.
        weight: (out_features, in_features), from ``shoestring.quantize_4bit`` or ``quantize_int8``.
        bias: (out_features), any floating-point dtype.

    Returns:
        (..., out_features), x's dtype. Bitwise repeatable. Differentiable once by x and bias; x is not saved.

    Raises:
        RuntimeError: a shape or dtype that does not fit.
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


def quantized_linear_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """The same with the dense weight whole in memory, in x's dtype."""
    return F.linear(
        x, weight.dequantize(torch.float32).to(x.dtype), None if bias is None else bias.to(x.dtype)
    )

"""int8 quantisation by rows, with the bytes of bitsandbytes' LLM.int8() weights (arXiv 2208.07339)."""

import torch
from torch import Tensor

from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts


def quantize_int8(x: Tensor) -> QuantizedTensor:
    """x in 8 bits an element and one scale a row: an element is its code times the row's largest magnitude over 127.

    Args:
        x: (..., columns); fp32, bf16 or fp16. Detached: quantising has no gradient.

    Returns:
        A :class:`QuantizedTensor` of x's shape and dtype. Its bytes are those of bitsandbytes' ``int8_vectorwise_quant``
        on the CPU (its ``Linear8bitLt`` converts to fp16 first: ``quantize_int8(x.half())`` has that layer's bytes).
        Rows of zeros stay zero. A row with a NaN or an infinity has zeros for codes, and dequantises to NaN.

    Raises:
        RuntimeError: another dtype, a scalar, or rows without elements.
    """
    return quantize_parts(x.detach(), "int8", 0, False)


def dequantize_int8(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dense tensor: code times scale times 1 / 127 in fp32, rounded once to ``dtype`` (by default q's own).

    Args:
        q: an int8 tensor.
        dtype: fp32, bf16 or fp16.

    Raises:
        TypeError: q is not an int8 QuantizedTensor.
        RuntimeError: a dtype that is not one of the three.
    """
    if not isinstance(q, QuantizedTensor) or q.quant_type != "int8":
        received = f"one of {q.quant_type}" if isinstance(q, QuantizedTensor) else type(q).__name__
        raise TypeError(f"dequantize_int8: q: expected an int8 QuantizedTensor, received {received}")
    return q.dequantize(dtype)


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """packed (x's shape) and absmax (without its last dimension), in plain PyTorch."""
    absmax = x.abs().amax(-1).float()
    scale = absmax.reciprocal() * 127
    plain = scale.isfinite() & (scale > 0)  # else the row is zero, or next to it, or not finite
    codes = torch.round(x * torch.where(plain, scale, 0).unsqueeze(-1))
    return torch.where(plain.unsqueeze(-1), codes, 0).to(torch.int8), absmax


def dequantize_int8_reference(packed: Tensor, absmax: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The dense tensor from its parts, in plain PyTorch."""
    return (packed * absmax.unsqueeze(-1) * (1 / 127)).to(dtype)

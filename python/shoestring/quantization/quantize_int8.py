"""int8 quantisation with one scale per row.

Its bytes equal those of bitsandbytes' LLM.int8() (arXiv 2208.07339).
"""

import torch
from torch import Tensor

from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts

__all__ = ["dequantize_int8", "quantize_int8"]


def quantize_int8(x: Tensor) -> QuantizedTensor:
    """Quantise x to 8 bits per element and one scale per row.

    An element of x is approximately ``code * absmax / 127``, where absmax is the largest magnitude in the
    element's row.

    Args:
        x: (..., columns); fp32, bf16 or fp16. x is detached, since quantisation has no gradient.

    Returns:
        A :class:`QuantizedTensor` with the shape and dtype of x. Its bytes equal those of bitsandbytes'
        ``int8_vectorwise_quant`` on the CPU. bitsandbytes' ``Linear8bitLt`` converts weights to fp16 first;
        to get the bytes of ``Linear8bitLt``, call ``quantize_int8(x.half())``. Rows of zeros stay zero. A row
        with a NaN or an infinity has codes of zero and dequantises to NaN.

    Raises:
        RuntimeError: x has another dtype, is a scalar, or has rows without elements.

    Example:
        >>> weight = torch.randn(256, 1024, dtype=torch.bfloat16)
        >>> q = shoestring.quantize_int8(weight)
        >>> weight.nbytes, q.nbytes_held()
        (524288, 263168)
    """
    return quantize_parts(x.detach(), "int8", 0, False)


def dequantize_int8(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise an int8 tensor: ``code * absmax * (1 / 127)``, computed in fp32 and rounded once.

    Args:
        q: a tensor from :func:`quantize_int8`.
        dtype: dtype of the result: fp32, bf16 or fp16. None: the dtype of q.

    Returns:
        A dense tensor with the shape of q.

    Raises:
        TypeError: q is not an int8 QuantizedTensor.
        RuntimeError: dtype is not fp32, bf16 or fp16.

    Example:
        >>> x = torch.randn(64, 256)
        >>> y = shoestring.dequantize_int8(shoestring.quantize_int8(x))
        >>> torch.allclose(y, x, atol=0.005 * float(x.abs().max()))
        True
    """
    if not isinstance(q, QuantizedTensor) or q.quant_type != "int8":
        received = f"one of {q.quant_type}" if isinstance(q, QuantizedTensor) else type(q).__name__
        raise TypeError(f"dequantize_int8: q: expected an int8 QuantizedTensor, received {received}")
    return q.dequantize(dtype)

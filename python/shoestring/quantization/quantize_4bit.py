"""4-bit quantisation: NF4 and FP4 with the same bytes as bitsandbytes, and int4 whose scales are fitted."""

import torch
from torch import Tensor

from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts

__all__ = ["dequantize_4bit", "quantize_4bit"]

# The values that the 16 codes of each 4-bit type represent, for a scale of 1. NF4: quantiles of the normal
# distribution. FP4: a sign, two bits of exponent and one bit of mantissa.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4 = tuple(v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3))
# The negative half is 0.0 - v instead of -v, since the table of bitsandbytes has no -0.0.
CODES = {"nf4": _NF4, "fp4": _FP4 + tuple(0.0 - v for v in _FP4)}
TYPES = (*CODES, "int4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def code_values(quant_type: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the fp32 values that the 16 codes of a 4-bit type represent, for a scale of 1."""
    return torch.tensor(CODES.get(quant_type, range(-8, 8)), dtype=torch.float32, device=device)


def quantize_4bit(
    x: Tensor, quant_type: str = "nf4", block_size: int = 64, double_quant: bool = False
) -> QuantizedTensor:
    """Quantise x to 4 bits per element and one scale per block of elements.

    "int4" has 16 equally spaced values per block, given by a bf16 scale and a bf16 offset. Scale and offset
    are fitted to the block after HQQ (Badri and Shaji, Half-Quadratic Quantization, Mobius Labs, 2023). The
    fit minimises the sum of absolute errors. It alternates between a least-squares step and clamping the
    large errors.

    A comparison of int4 with NF4 in blocks of 64, at the same number of bits:

    - For normally distributed elements, the mean squared error is 0.81 and the mean absolute error 0.95 of
      NF4's.
    - If in addition one element in 200 is six times as large, the factors are 0.83 and 0.94.
    - One CPU core fits about 100 million elements/s, a twentieth of NF4's rate.
    - Quantising a dequantised int4 tensor again may give other values.

    Args:
        x: any shape; fp32, bf16 or fp16. x is detached, since quantisation has no gradient.
        quant_type: "nf4" (QLoRA, arXiv 2305.14314), "fp4" or "int4".
        block_size: number of consecutive elements of the flattened x that share a scale, a power of two from
            32 to 4096.
        double_quant: quantise the scales too, to 8 bits (double quantisation). At the default block size
            this takes 4.127 instead of 4.5 bits per element. Not supported for "int4".

    Returns:
        A :class:`QuantizedTensor` with the shape and dtype of x. For NF4 and FP4 its bytes equal those of
        bitsandbytes on the CPU; for int4 they are the same on every device. A block of zeros stays exactly
        zero. A NaN makes its whole block NaN, and so does an infinity in int4. int4 has the range of fp32,
        except that differences below 1e-37 within a block are lost.

    Raises:
        RuntimeError: the dtype, quant_type or block_size is not supported.
        ValueError: quant_type is "int8", or double_quant is True for "int4".

    Example:
        >>> weight = torch.randn(256, 1024, dtype=torch.bfloat16)
        >>> q = shoestring.quantize_4bit(weight, double_quant=True)
        >>> weight.nbytes, q.nbytes_held()
        (524288, 136260)
    """
    if quant_type == "int8":
        raise ValueError(
            "quantize_4bit: quant_type: expected 'nf4', 'fp4' or 'int4', received 'int8'. Call quantize_int8."
        )
    return quantize_parts(x.detach(), quant_type, block_size, double_quant)


def dequantize_4bit(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise a 4-bit tensor.

    A dequantised element is the value of its code times the scale of its block (for int4, plus the offset of
    its block), computed in fp32 and rounded once.

    Args:
        q: a tensor from :func:`quantize_4bit`.
        dtype: dtype of the result: fp32, bf16 or fp16. None: the dtype of q.

    Returns:
        A dense tensor with the shape of q.

    Raises:
        TypeError: q is not a QuantizedTensor, or it is int8.
        RuntimeError: dtype is not fp32, bf16 or fp16.

    Example:
        >>> q = shoestring.quantize_4bit(torch.randn(64, 256))
        >>> shoestring.dequantize_4bit(q).dtype, shoestring.dequantize_4bit(q, torch.bfloat16).dtype
        (torch.float32, torch.bfloat16)
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"dequantize_4bit: q: expected a QuantizedTensor, received {type(q).__name__}")
    if q.quant_type not in TYPES:
        raise TypeError(f"dequantize_4bit: q: expected 4 bits, received {q.quant_type}; call q.dequantize()")
    return q.dequantize(dtype)

"""4-bit quantisation: NF4 and FP4, with bitsandbytes' bytes, and fitted int4."""

import torch
from torch import Tensor

from shoestring.quantization.int4_reference import fit_int4_reference, int4_scales
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts

# By code. NF4: quantiles of the normal distribution; FP4: sign, two bits of exponent, one of mantissa.
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
CODES = {"nf4": _NF4, "fp4": _FP4 + tuple(0.0 - v for v in _FP4)}  # bitsandbytes has no -0.0 either
TYPES = (*CODES, "int4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def code_values(quant_type: str) -> Tensor:
    """The 16 values by code, in units of a block's scale, fp32."""
    return torch.tensor(CODES.get(quant_type, range(-8, 8)), dtype=torch.float32)


def quantize_4bit(
    x: Tensor, quant_type: str = "nf4", block_size: int = 64, nested: bool = False
) -> QuantizedTensor:
    """x in 4 bits an element and one scale a block.

    "int4" is fitted to the weights, after HQQ (Badri and Shaji, Half-Quadratic Quantization, Mobius Labs, 2023): 16 equal
    steps with a scale and an offset, both bf16, that are sought for the smallest sum of errors by turns of least squares and
    of pulling back what is far off. In blocks of 64 its mean squared error is 0.81 of NF4's on normal numbers and 0.83 where
    one in 200 is six times as large; the mean absolute error 0.95 and 0.94; held in as many bits. A core fits some 100
    million elements a second, a twentieth of NF4's rate. Quantising what int4 stood for may give other values.

    Args:
        x: any shape; fp32, bf16 or fp16. Detached: quantising has no gradient.
        quant_type: "nf4" (QLoRA, arXiv 2305.14314), "fp4" or "int4".
        block_size: elements along the flattened x that share a scale: a power of two from 32 to 4096.
        nested: hold the scales in 8 bits too (double quantisation): 4.127 instead of 4.5 bits an element at the
            default block size. Not with "int4".

    Returns:
        A :class:`QuantizedTensor` of x's shape and dtype. Of NF4 and FP4 its bytes are those of bitsandbytes' CPU path, of
        int4 the same on every device. A block of zeros stays exactly zero; a NaN, and in int4 an infinity, makes its block
        NaN. int4 has fp32's range, but for a block's differences below 1e-37, which are lost.

    Raises:
        RuntimeError: a dtype, type or block size that does not exist.
        ValueError: nested with "int4".
    """
    return quantize_parts(x.detach(), quant_type, block_size, nested)


def dequantize_4bit(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dense tensor: value by code times scale (int4: plus offset) in fp32, rounded once to ``dtype``, by default q's.

    Args:
        q: a quantised tensor.
        dtype: fp32, bf16 or fp16.

    Raises:
        TypeError: q is not a QuantizedTensor, or an int8 one.
        RuntimeError: a dtype that is not one of the three.
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"dequantize_4bit: q: expected a QuantizedTensor, received {type(q).__name__}")
    if q.quant_type not in TYPES:
        raise TypeError(f"dequantize_4bit: q: expected 4 bits, received {q.quant_type}; call q.dequantize()")
    return q.dequantize(dtype)


def quantize_4bit_reference(
    x: Tensor, quant_type: str = "nf4", block_size: int = 64
) -> tuple[Tensor, Tensor]:
    """packed and absmax, both flat, in plain PyTorch."""
    flat = x.flatten().float()
    numel, tail = flat.numel(), flat.numel() % block_size
    if quant_type == "int4":
        codes, absmax = fit_int4_reference(flat, block_size)
        return codes[: numel + numel % 2 : 2] << 4 | codes[1 : numel + numel % 2 : 2], absmax
    blocks = torch.nn.functional.pad(flat, (0, -numel % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38)).unsqueeze(1)
    if tail:  # the last, short block is divided, and what fills it is 0
        absmax[-1] = absmax[-1].clamp(min=1e-38)
        scaled[-1, :tail] = blocks[-1, :tail] / absmax[-1]
        scaled[-1, tail:] = 0
    values = code_values(quant_type).to(x.device)
    # Of FP4's two zeros the first, 0, takes what is 0 and the second, 8, the small positive numbers.
    ranks = range(16) if quant_type == "nf4" else (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
    order = torch.tensor(ranks, device=x.device)
    midpoints = (values[order[:-1]] + values[order[1:]]) / 2
    codes = order[torch.bucketize(scaled.flatten()[: numel + numel % 2], midpoints)].to(torch.uint8)
    return codes[::2] << 4 | codes[1::2], absmax


def dequantize_4bit_reference(
    packed: Tensor,
    absmax: Tensor,
    nested: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quant_type: str = "nf4",
    block_size: int = 64,
) -> Tensor:
    """The dense tensor from its parts, in plain PyTorch."""
    packed, absmax = packed.flatten(), absmax.flatten()
    if nested is not None:
        group = torch.arange(absmax.numel(), device=absmax.device) // 256
        absmax = nested[1:257][absmax.long()] * nested[257:][group] + nested[0]
    numel = torch.Size(shape).numel()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[:numel].long()
    absmax, offset = int4_scales(absmax) if quant_type == "int4" else (absmax, None)
    scaled = code_values(quant_type).to(packed.device)[codes] * absmax.repeat_interleave(block_size)[:numel]
    if offset is not None:
        scaled = scaled + offset.repeat_interleave(block_size)[:numel]
    return scaled.to(dtype).view(shape)

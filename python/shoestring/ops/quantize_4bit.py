"""4-bit quantisation: NF4 and FP4, with bitsandbytes' bytes."""

import torch
from torch import Tensor

from shoestring.quantized_tensor import QuantizedTensor, quantize_parts

# By code. NF4: quantiles of the normal distribution; FP4: sign, two bits of exponent, one of mantissa.
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
_NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
_NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_FP4 = tuple(v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3))
CODES = {"nf4": _NF4, "fp4": _FP4 + tuple(0.0 - v for v in _FP4)}  # bitsandbytes has no -0.0 either
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def code_values(quant_type: str) -> Tensor:
    """The 16 values of "nf4" or "fp4" by code, fp32."""
    return torch.tensor(CODES[quant_type], dtype=torch.float32)


def quantize_4bit(
    x: Tensor, quant_type: str = "nf4", block_size: int = 64, nested: bool = False
) -> QuantizedTensor:
    """x in 4 bits an element and one scale a block.

    Args:
        x: any shape; fp32, bf16 or fp16. Detached: quantising has no gradient.
        quant_type: "nf4" (QLoRA, arXiv 2305.14314) or "fp4".
        block_size: elements along the flattened x that share a scale: a power of two from 32 to 4096.
        nested: hold the scales in 8 bits too (double quantisation): 4.127 instead of 4.5 bits an element at the
            default block size.

    Returns:
        A :class:`QuantizedTensor` of x's shape and dtype. Its bytes are those of bitsandbytes' CPU path. A block of
        zeros stays exactly zero; a NaN makes its block NaN.

    Raises:
        RuntimeError: a dtype, type or block size that does not exist.
    """
    return quantize_parts(x.detach(), quant_type, block_size, nested)


def dequantize_4bit(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dense tensor: value by code times scale in fp32, rounded once to ``dtype`` (by default q's own).

    Args:
        q: a quantised tensor.
        dtype: fp32, bf16 or fp16.

    Raises:
        TypeError: q is not a QuantizedTensor, or an int8 one.
        RuntimeError: a dtype that is not one of the three.
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"dequantize_4bit: q: expected a QuantizedTensor, received {type(q).__name__}")
    if q.quant_type not in CODES:
        raise TypeError(f"dequantize_4bit: q: expected 4 bits, received {q.quant_type}; call q.dequantize()")
    return q.dequantize(dtype)


def quantize_4bit_reference(x: Tensor, quant_type: str = "nf4", block_size: int = 64) -> tuple[Tensor, Tensor]:
    """packed and absmax, both flat, in plain PyTorch."""
    flat = x.flatten().float()
    numel, tail = flat.numel(), flat.numel() % block_size
    blocks = torch.nn.functional.pad(flat, (0, -numel % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38)).unsqueeze(1)
    if tail:  # the last, short block is divided, and what fills it is 0
        absmax[-1] = absmax[-1].clamp(min=1e-38)
        scaled[-1, :tail] = blocks[-1, :tail] / absmax[-1]
        scaled[-1, tail:] = 0
    values = code_values(quant_type).to(x.device)
    # Of FP4's two zeros the first, 0, takes what is 0 and the second, 8, the small positive numbers.
    order = range(16) if quant_type == "nf4" else (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
    order = torch.tensor(order, device=x.device)
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
    scales = absmax.repeat_interleave(block_size)[:numel]
    return (code_values(quant_type).to(packed.device)[codes] * scales).to(dtype).view(shape)

"""Quantisation of weights, optimizer state and gradients in plain PyTorch, with the rounding of the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.quantization.nested_scales import GROUP, NestedScales
from shoestring.quantization.quantize_4bit import code_values
from shoestring.quantization.quantize_8bit import STATE_BLOCK
from shoestring.quantization.quantize_state_4bit import BIAS_4BIT, GROUP_4BIT, STEP_4BIT, bits, map_4bit
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts

# The fit of int4 takes STEPS steps, and sums in LANES interleaved sums.
LANES, STEPS = 16, 8


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x to int8 in plain PyTorch.

    Return codes (int8, the shape of x) and scales (fp32, one per row).
    """
    absmax = x.abs().amax(-1).float()
    scale = absmax.reciprocal() * 127
    # `plain` says which rows can be quantised. It is false for rows of (almost) zeros and for rows with a NaN
    # or an infinity.
    plain = scale.isfinite() & (scale > 0)
    codes = torch.round(x * torch.where(plain, scale, 0).unsqueeze(-1))
    return torch.where(plain.unsqueeze(-1), codes, 0).to(torch.int8), absmax


def dequantize_int8_reference(packed: Tensor, absmax: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Dequantise an int8 tensor, given as codes and scales, in plain PyTorch."""
    return (packed * absmax.unsqueeze(-1) * (1 / 127)).to(dtype)


def quantize_4bit_reference(
    x: Tensor, quant_type: str = "nf4", block_size: int = 64
) -> tuple[Tensor, Tensor]:
    """Quantise x to 4 bits in plain PyTorch. Return flat codes (uint8, two per byte) and flat scales."""
    flat = x.flatten().float()
    numel, tail = flat.numel(), flat.numel() % block_size
    if quant_type == "int4":
        codes, absmax = fit_int4_reference(flat, block_size)
        return codes[: numel + numel % 2 : 2] << 4 | codes[1 : numel + numel % 2 : 2], absmax
    blocks = torch.nn.functional.pad(flat, (0, -numel % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38)).unsqueeze(1)
    # bitsandbytes divides the elements of a short last block by the block's scale. It multiplies those of
    # full blocks by the reciprocal of the scale.
    if tail:
        absmax[-1] = absmax[-1].clamp(min=1e-38)
        scaled[-1, :tail] = blocks[-1, :tail] / absmax[-1]
        scaled[-1, tail:] = 0
    values = code_values(quant_type, x.device)
    # FP4 has two codes with the value 0: code 0 is for elements that are 0, code 8 for small positive ones.
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
    """Dequantise a 4-bit tensor, given as codes and scales, in plain PyTorch."""
    packed, absmax = packed.flatten(), absmax.flatten()
    if nested is not None:
        tables = NestedScales.of(nested)
        group = torch.arange(absmax.numel(), device=absmax.device) // GROUP
        absmax = tables.values[absmax.long()] * tables.scales[group] + tables.offset
    numel = torch.Size(shape).numel()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[:numel].long()
    absmax, offset = int4_scales(absmax) if quant_type == "int4" else (absmax, None)
    scaled = code_values(quant_type, packed.device)[codes] * absmax.repeat_interleave(block_size)[:numel]
    if offset is not None:
        scaled = scaled + offset.repeat_interleave(block_size)[:numel]
    return scaled.to(dtype).view(shape)


# The smallest normal fp32 number. Smaller scales are not used, since their reciprocals may overflow.
_SMALLEST = 2.0**-126


def int4_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the scales and offsets of an int4 tensor to fp32.

    Its int32 ``absmax`` holds them as pairs of bf16.
    """
    return (absmax << 16).view(torch.float32), (absmax & -0x10000).view(torch.float32)


def fit_int4_reference(flat: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantise a flat fp32 tensor to int4, with a scale and an offset that are fitted to each block.

    Returns:
        codes (uint8, 0 to 15, flat, the last block filled up to block_size) and absmax (int32, one for each
        block: a bf16 scale in the lower half and a bf16 offset in the upper half).
    """
    # A short last block is padded with copies of its last element, which change neither its minimum nor its
    # maximum. The mask `there` excludes the padding from all sums.
    fill = flat[-1:].expand(-flat.numel() % block_size)
    blocks = torch.cat([flat, fill]).view(-1, block_size)
    counts = (
        (flat.numel() - block_size * torch.arange(len(blocks), device=flat.device))
        .clamp(max=block_size)
        .unsqueeze(1)
    )
    there = torch.arange(block_size, device=flat.device) < counts
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale, offset = _first(low, high)
    step = scale * 0.5
    best: tuple[Tensor, ...] = (torch.full_like(scale, torch.inf), scale, offset)
    for i in range(STEPS + 1):
        code, left = _codes(blocks, scale, offset, there)
        error = _sum(left.abs())
        better = error < best[0]
        best = tuple(
            torch.where(better, new, old) for new, old in zip((error, scale, offset), best, strict=True)
        )
        if i == STEPS:
            break
        pull = left.clamp(-step, step)
        sums = [_sum(t).double() for t in (code, code * code, pull, code * pull)]
        scale, offset = _next(scale, offset, counts.double(), *sums)
        step = step * torch.tensor(1 / 1.25, device=step.device)
    _, scale, offset = best
    finite = blocks.isfinite().all(1, keepdim=True)
    zero = (blocks == 0).all(1, keepdim=True)
    scale = torch.where(finite & ~zero, scale, 0)
    offset = torch.where(finite, torch.where(zero, 0, offset), torch.nan)
    code, _ = _codes(torch.where(finite, blocks, 0), scale, offset.nan_to_num(), there)
    code = torch.where(there, torch.where(finite, code, -8), -8)
    absmax = scale.view(torch.int32) >> 16 & 0xFFFF | offset.view(torch.int32) & -0x10000
    return (code + 8).to(torch.uint8).flatten(), absmax.flatten()


def _first(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial scale and offset of each block for the int4 fit.

    The initial scale puts 15.5 quantisation steps between the block's minimum and maximum. With 15 steps, the
    fit would converge to larger errors.
    """
    offset = _bf16(((7 * low.double() + 8 * high.double()) / 15).float())
    reach = torch.maximum((high.double() - offset.double()) / 7, (offset.double() - low.double()) / 8)
    scale = _bf16(torch.minimum(reach * (15 / 15.5), _room(offset) * (255 / 256 / 8)).float())
    return torch.where(scale >= _SMALLEST, scale, 0), offset


def _codes(x: Tensor, scale: Tensor, offset: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int4 codes (-8 to 7) of x and their errors.

    Padding after the end of a short block has code 0 and error 0.
    """
    away = x - offset
    code = (away * torch.where(scale > 0, 1 / scale, 0)).clamp(-8, 7).round()
    return torch.where(there, code, 0), torch.where(there, away - code * scale, 0)


def _next(
    scale: Tensor, offset: Tensor, n: Tensor, codes: Tensor, squares: Tensor, pulls: Tensor, products: Tensor
) -> tuple[Tensor, Tensor]:
    """Move each block's scale and offset by twice the least-squares step of the int4 fit; return both.

    A block keeps its former scale and offset if the new scale is too small or a dequantised value would
    overflow.
    """
    spread = n * squares - codes * codes
    up = torch.where(spread > 0, (n * products - codes * pulls) / spread, 0).float()
    along = ((pulls - up.double() * codes) / n).float()
    s, o = _bf16(scale + 2 * up), _bf16(offset + 2 * along)
    sound = (s >= _SMALLEST) & (8 * s.double() <= _room(o))
    return torch.where(sound, s, scale), torch.where(sound, o, offset)


def _room(offset: Tensor) -> Tensor:
    """Return the largest ``abs(code * scale)`` for which ``offset + code * scale`` stays finite."""
    return torch.finfo(torch.float32).max - offset.double().abs()


def _bf16(x: Tensor) -> Tensor:
    largest = torch.finfo(torch.bfloat16).max
    return x.to(torch.bfloat16).float().clamp(-largest, largest)


def _sum(x: Tensor) -> Tensor:
    """Sum each row in the order of the kernels: first 16 interleaved sums, then a tree that adds them."""
    total = torch.zeros_like(x[:, :LANES])
    for i in range(0, x.shape[1], LANES):
        total = total + x[:, i : i + LANES]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


class _StraightThrough(torch.autograd.Function):
    """Take given values in forward, and pass the gradient on unchanged in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def fake_quantize_reference(
    x: Tensor, quant_type: str = "nf4", block_size: int | None = None, double_quant: bool = False
) -> Tensor:
    """Compute ``fake_quantize`` in plain PyTorch; with double_quant, by the operators of quantisation."""
    fixed, block = x.detach(), 64 if block_size is None else block_size
    if double_quant:
        values = quantize_parts(fixed, quant_type, block, True).dequantize()
    elif quant_type == "int8":
        values = dequantize_int8_reference(*quantize_int8_reference(fixed), dtype=x.dtype)
    else:
        parts = quantize_4bit_reference(fixed, quant_type, block)
        options: dict[str, Any] = {"shape": tuple(x.shape), "dtype": x.dtype}
        values = dequantize_4bit_reference(*parts, quant_type=quant_type, block_size=block, **options)
    result: Tensor = _StraightThrough.apply(x, values)  # type: ignore[no-untyped-call]
    return result


def quantized_linear_reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``quantized_linear`` in plain PyTorch, with the whole dequantised weight in memory."""
    return F.linear(
        x, weight.dequantize(torch.float32).to(x.dtype), None if bias is None else bias.to(x.dtype)
    )


def dynamic_map(signed: bool) -> Tensor:
    """Return the fp32 values of the 8-bit codes: 0, 1 and, in each of 7 decades, equally spaced values."""
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade if signed else 2 ** (decade + 1)
        scale = 1 / 10 ** (6 - decade)
        # Slope and offset of the 8-bit map are rounded to fp32, since the kernels have them as fp32
        # constants.
        slope = torch.tensor(scale * 0.9 / bins).double().item()
        offset = torch.tensor(scale * (0.1 + 0.45 / bins) - slope * bins).double().item()
        magnitudes = [offset + slope * (bins + j) for j in range(bins)]
        values += magnitudes + ([-m for m in magnitudes] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def quantize_8bit_reference(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_8bit`` in plain PyTorch, by a binary search in the table of values."""
    values = dynamic_map(signed)
    middles = (values[1:] + values[:-1]) / 2
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % STATE_BLOCK)).view(-1, STATE_BLOCK)
    scale = blocks.abs().amax(1)
    # Tiny scales and their elements are multiplied by a power of two, so that reciprocals of scales stay
    # finite. The resulting codes do not change.
    tiny = torch.where(scale < 2.0**-100, 2.0**100, 1.0)
    inverse = torch.where(scale > 0, 1 / (scale * tiny), 0)
    scaled = blocks * tiny[:, None] * inverse[:, None]
    codes = torch.searchsorted(middles, scaled)
    if signed:  # halfway between two values, take the code nearer to zero
        codes = torch.where(scaled < 0, torch.searchsorted(middles, scaled, right=True), codes)
    else:
        codes = torch.where(blocks == 0, 0, codes.clamp(min=1))
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), scale


def dequantize_8bit_reference(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Compute ``dequantize_8bit`` in plain PyTorch, by a look-up in the table of values."""
    values = dynamic_map(signed)[codes.int()].flatten()
    return (values * scale.repeat_interleave(STATE_BLOCK)[: codes.numel()]).view(codes.shape)


def dither(step: int, weight: int) -> Tensor:
    """Return the dither of 256 elements in an optimizer step.

    The dither is int32. It is added to the bit patterns of the elements before rounding.
    """
    phase = (torch.arange(STATE_BLOCK, dtype=torch.int32) * 25087 + step % 65536 * 46073) & 0xFFFF
    return torch.where(phase < 32768, phase, phase - 65536) * weight


def quantize_state_4bit_reference(
    x: Tensor, *, signed: bool, step: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``quantize_state_4bit`` in plain PyTorch.

    Every operation rounds in the same way as in the kernels.
    """
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % STATE_BLOCK))
    groups = padded.view(-1, GROUP_4BIT[signed])
    scale = groups.abs().amax(1, keepdim=True)
    # In signed state, the scale is minus the element of largest magnitude. If a positive and a negative
    # element have the same magnitude, the negative one is taken.
    if signed:
        scale = torch.where((groups == -scale).any(1, keepdim=True) | scale.isnan(), scale, -scale)
    # Tiny scales and their elements are multiplied by a power of two, so that reciprocals of scales stay
    # finite. The resulting codes do not change.
    raised = torch.where(scale.abs() < 2.0**-100, 2.0**100, 1.0)
    inverse = torch.where(scale == 0, 0, 1 / (scale * raised))
    parts = (groups * raised * inverse).view(-1, STATE_BLOCK)
    if signed:
        parts = torch.where(parts.isnan(), torch.inf, parts).clamp(max=map_4bit(True)[7].item())
        offset = int(STEP_4BIT[True] * (0.075 if step is None else 0.04))
        steps = bits(parts.abs() + BIAS_4BIT) - bits(torch.tensor(BIAS_4BIT)) - offset
    else:
        parts = torch.where(parts.isnan(), 0, parts).clamp(min=0)
        steps = bits(torch.ones(())) - bits(parts) + (0 if step is None else 52)
    if step is not None:
        steps = steps + dither(step, 80 if signed else 104)
    k = (steps.float() * torch.tensor(1 / STEP_4BIT[signed])).clamp(0, 8 if signed else 15).round().int()
    codes = (torch.where(parts < 0, -k, k) & 15).flatten()
    return (codes[::2] | codes[1::2] << 4).to(torch.uint8), scale.flatten()


def dequantize_state_4bit_reference(codes: Tensor, scale: Tensor, *, signed: bool, numel: int) -> Tensor:
    """Compute ``dequantize_state_4bit`` in plain PyTorch, by a look-up in the table of values."""
    nibbles = torch.stack([codes & 15, codes >> 4], 1).flatten().int()
    return (map_4bit(signed)[nibbles] * scale.repeat_interleave(GROUP_4BIT[signed]))[:numel]


# For each number of bits: the elements of a block, the bytes of its record, and the largest code.
CODECS = {8: (256, 260, 127), 4: (128, 68, 7), 1: (256, 36, 0)}
HUGE, TINY = 2.0**127, 2.0**-100


def compress_gradient_reference(error: Tensor, gradient: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Compute ``compress_gradient_`` in plain PyTorch; return the codes and the new error."""
    block, record, levels = CODECS[bits]
    numel = gradient.numel()
    x = torch.nn.functional.pad(error.flatten() + gradient.flatten().float(), (0, -numel % block))
    x = x.view(-1, block)
    magnitude = x.abs()
    codes = torch.zeros(len(x), record, dtype=torch.uint8, device=x.device)
    if bits == 1:
        total = magnitude
        while total.shape[1] > 1:  # a tree of halves
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        counts = torch.full_like(total, block)
        counts[-1:] -= -numel % block
        usable = total < HUGE
        scale = torch.where(usable, total / counts, torch.nan)
        negative = x.signbit()
        values = torch.where(negative, -scale, scale)
        packed = (negative.view(-1, block // 8, 8) << torch.arange(8, device=x.device)).sum(2)
    else:
        top = magnitude.amax(1, keepdim=True)
        usable = top < HUGE
        scale = ((top * torch.tensor(1 / levels)).view(torch.int32) + 0xFF & ~0xFF).view(torch.float32)
        scale = torch.where(top < TINY, 0, torch.where(usable, scale, torch.nan))
        code = torch.where(usable & (scale > 0), x * (1 / scale), 0).round()
        values = code * scale
        integers = code.int()
        packed = integers + 128
        if bits == 4:
            packed = integers[:, : block // 2] + 8 | integers[:, block // 2 :] + 8 << 4
    codes[:, :4] = scale.flatten().view(torch.uint8).view(-1, 4)
    codes[:, 4:] = torch.where(usable, packed, 0)
    left = torch.where(usable, x - values, 0).flatten()[:numel]
    return codes.flatten(), left.view_as(error)


def decompress_mean_reference(codes: Tensor, *, numel: int, bits: int) -> Tensor:
    """Compute ``decompress_mean_`` in plain PyTorch; return (numel), fp32."""
    block, record, _ = CODECS[bits]
    blocks = (numel + block - 1) // block
    total = torch.zeros(blocks, block, device=codes.device)
    for row in codes:
        records = row[: blocks * record].view(blocks, record)
        scale = records[:, :4].flatten().clone().view(torch.float32)[:, None]
        packed = records[:, 4:].int()
        if bits == 8:
            total += (packed - 128) * scale
        elif bits == 4:
            total += (torch.cat([packed & 15, packed >> 4], 1) - 8) * scale
        else:
            signs = (packed[:, :, None] >> torch.arange(8, device=codes.device) & 1).view(blocks, block)
            total += torch.where(signs > 0, -scale, scale)
    return (total * torch.tensor(1 / len(codes))).flatten()[:numel]

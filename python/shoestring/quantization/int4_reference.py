"""The fit of int4 scales and offsets in plain PyTorch, with the rounding of csrc/quantization/fit_int4.h."""

import torch
from torch import Tensor

LANES, STEPS = 16, 8
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

"""The 4-bit codes that the state of optimizers may be kept in."""

import torch
from torch import Tensor

from shoestring.quantization.quantize_8bit import STATE_BLOCK

# Of signed and of unsigned codes: the elements that share a scale, and a step between codes in last bits of an fp32.
GROUP_4BIT = {True: 32, False: 128}
STEP_4BIT = {True: 161 << 15, False: 104 << 16}
BIAS_4BIT = 1 / 32  # where the logarithm of signed magnitudes begins


def quantize_state_4bit(x: Tensor, *, signed: bool, step: int | None = None) -> tuple[Tensor, Tensor]:
    """Block-wise 4-bit codes of x, on a logarithmic scale below the largest magnitude of a group of elements.

    The format is shoestring's own. Signed codes (groups of 32) are two's complement nibbles whose magnitudes are
    ``(33^(k / 8) - 1) / 32``, k = 0..8, and the scale has the sign that makes the largest element -8. Unsigned codes
    (groups of 128) stand for ``2^(-13 / 16 k)``, k = 0..15, and never for zero. "Logarithm" is the piecewise linear one
    that the bits of an fp32 are.

    Args:
        x: any shape, fp32; not negative for ``signed=False``. Its elements are taken in their order.
        signed: the map for first moments; otherwise that for second moments.
        step: the number of an optimizer's step: an element between two codes then rounds up in as many of the steps as
            its place between them says, so that what moves by less than half a code a step moves at all. None: to the
            nearest code (if signed, by 0.075 of a step nearer to zero, as the error of an update is smallest).

    Returns:
        codes (uint8, flat, 128 for each 256 elements begun; element 2 i in the lower nibble of byte i) and scale (fp32,
        flat, 8 for each 256 elements begun, signed, or 2). What lies past x's end is coded as zeros are.

    Raises:
        RuntimeError: x is not fp32.
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.quantize_state_4bit(x, signed=signed, step=step)
    return result


def dequantize_state_4bit(codes: Tensor, scale: Tensor, *, signed: bool, numel: int) -> Tensor:
    """The fp32 values of ``quantize_state_4bit``'s codes and scale: flat, the first ``numel``. Zero scales mean zeros.

    Raises:
        RuntimeError: a dtype or shape that does not fit.
    """
    result: Tensor = torch.ops.shoestring.dequantize_state_4bit(codes, scale, signed=signed, numel=numel)
    return result


def map_4bit(signed: bool) -> Tensor:
    """The 16 values of the codes for a scale of one, by code, fp32."""
    steps = torch.arange(16, dtype=torch.int32)
    if not signed:
        return (bits(torch.ones(())) - steps * STEP_4BIT[False]).view(torch.float32)
    k = torch.where(steps < 8, steps, 16 - steps)
    magnitude = (bits(torch.tensor(BIAS_4BIT)) + k * STEP_4BIT[True]).view(torch.float32) - BIAS_4BIT
    return torch.where(steps < 8, magnitude, -magnitude)


def bits(x: Tensor) -> Tensor:
    """The bits of fp32 numbers, int32."""
    return x.view(torch.int32)


def dither(step: int, weight: int) -> Tensor:
    """What is added to the bits of a block's 256 elements before they are divided by the map's step, int32."""
    phase = (torch.arange(STATE_BLOCK, dtype=torch.int32) * 25087 + step % 65536 * 46073) & 0xFFFF
    return torch.where(phase < 32768, phase, phase - 65536) * weight


def quantize_state_4bit_reference(
    x: Tensor, *, signed: bool, step: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, on fp32 numbers and their bits; every operation rounds as in the kernels."""
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % STATE_BLOCK))
    groups = padded.view(-1, GROUP_4BIT[signed])
    scale = groups.abs().amax(1, keepdim=True)
    if signed:  # minus the largest; of two equally large ones, the negative one is that
        scale = torch.where((groups == -scale).any(1, keepdim=True) | scale.isnan(), scale, -scale)
    # A power of two keeps the reciprocal of a tiny scale finite, and changes no code.
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
    """The same in plain PyTorch, by looking the codes up."""
    nibbles = torch.stack([codes & 15, codes >> 4], 1).flatten().int()
    return (map_4bit(signed)[nibbles] * scale.repeat_interleave(GROUP_4BIT[signed]))[:numel]

"""Quantisation of optimizer state to 4-bit codes on a logarithmic scale."""

import torch
from torch import Tensor

from shoestring.quantization.quantize_8bit import STATE_BLOCK

# GROUP_4BIT is the number of elements that share a scale. STEP_4BIT is the distance between adjacent codes,
# measured between the bit patterns of their fp32 values, read as integers. The keys of both dicts are the
# values of the argument `signed`.
GROUP_4BIT = {True: 32, False: 128}
STEP_4BIT = {True: 161 << 15, False: 104 << 16}
# This number is added to the magnitudes of signed state before their logarithm is taken, so that code 0
# represents the value 0.
BIAS_4BIT = 1 / 32


def quantize_state_4bit(x: Tensor, *, signed: bool, step: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise optimizer state to 4-bit codes on a logarithmic scale, in groups of 32 or 128 elements.

    Codes are relative to the largest magnitude in a group. The format is specific to shoestring.

    - Signed codes (groups of 32 elements) are two's complement nibbles with magnitudes ``(33^(k / 8) - 1) /
      32``, k = 0..8. The sign of the scale is chosen so that the element of largest magnitude has the code
      -8.
    - Unsigned codes (groups of 128 elements) stand for ``2^(-13 / 16 k)``, k = 0..15, and never for zero.

    Codes are computed with an approximate logarithm: the bit pattern of an fp32 number, read as an integer,
    is a piecewise linear function of the logarithm.

    Args:
        x: any shape, fp32; must not be negative for ``signed=False``. Groups are consecutive elements of the
            flattened x.
        signed: True for the map of an optimizer's first moments, False for the map of second moments.
        step: number of the optimizer step, for dithered rounding: over many steps, an element between two
            codes rounds up in proportion to its position between them. Without dithering, a change of less
            than half a code per step would be lost. None: round to the nearest code. The magnitude of a
            signed element is then lowered by 0.075 of a code distance before it is rounded. This minimises
            the error of the update.

    Returns:
        codes (uint8, flat, 128 bytes per block of 256 elements; element 2 i is in the lower nibble of byte i)
        and scale (fp32, flat; 8 scales per block if signed, else 2). A partial last block is padded with
        elements of value 0 before it is quantised.

    Raises:
        RuntimeError: x is not fp32.

    Example:
        >>> codes, scale = shoestring.ops.quantize_state_4bit(torch.rand(1024), signed=False)
        >>> codes.shape, scale.shape
        (torch.Size([512]), torch.Size([8]))
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.quantize_state_4bit(x, signed=signed, step=step)
    return result


def dequantize_state_4bit(codes: Tensor, scale: Tensor, *, signed: bool, numel: int) -> Tensor:
    """Dequantise the result of ``quantize_state_4bit``. A scale of zero gives zeros.

    Args:
        codes, scale: as returned by ``quantize_state_4bit``.
        signed: as given to ``quantize_state_4bit``.
        numel: number of elements to return.

    Returns:
        (numel), fp32.

    Raises:
        RuntimeError: a dtype or shape does not fit.

    Example:
        >>> codes, scale = shoestring.ops.quantize_state_4bit(torch.randn(1000), signed=True)
        >>> shoestring.ops.dequantize_state_4bit(codes, scale, signed=True, numel=1000).shape
        torch.Size([1000])
    """
    result: Tensor = torch.ops.shoestring.dequantize_state_4bit(codes, scale, signed=signed, numel=numel)
    return result


def map_4bit(signed: bool) -> Tensor:
    """Return the fp32 values that the 16 codes of 4-bit optimizer state represent, for a scale of 1."""
    steps = torch.arange(16, dtype=torch.int32)
    if not signed:
        return (bits(torch.ones(())) - steps * STEP_4BIT[False]).view(torch.float32)
    k = torch.where(steps < 8, steps, 16 - steps)
    magnitude = (bits(torch.tensor(BIAS_4BIT)) + k * STEP_4BIT[True]).view(torch.float32) - BIAS_4BIT
    return torch.where(steps < 8, magnitude, -magnitude)


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of fp32 numbers as int32."""
    return x.view(torch.int32)


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

"""Quantisation of optimizer state to 4-bit codes on a logarithmic scale."""

import torch
from torch import Tensor

__all__ = ["dequantize_state_4bit", "quantize_state_4bit"]

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

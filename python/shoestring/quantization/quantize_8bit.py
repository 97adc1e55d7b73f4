"""Quantisation of optimizer state to 8-bit codes with one scale per block."""

import torch
from torch import Tensor

# Number of elements that share a scale; the state of each parameter begins at a multiple of this number.
STATE_BLOCK = 256


def quantize_8bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise x to 8-bit codes, in blocks of 256 elements.

    The scale of a block is its largest magnitude. A code is the index of the value nearest to ``x / scale``
    in a dynamic map, a table of 256 values (8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861).
    The codes equal those of bitsandbytes with block size 256, with one exception: in the unsigned map a
    positive number never becomes zero. A second moment of zero would make the optimizer's update infinite.

    Args:
        x: any shape, fp32; must not be negative for ``signed=False``.
        signed: True for the map of an optimizer's first moments, False for the map of second moments.

    Returns:
        codes (the shape of x, uint8) and scale (ceil(elements / 256), fp32). Blocks are consecutive elements
        of the flattened x.

    Raises:
        RuntimeError: x is not fp32.

    Example:
        >>> codes, scale = shoestring.ops.quantize_8bit(torch.randn(4, 250), signed=True)
        >>> codes.shape, codes.dtype, scale.shape
        (torch.Size([4, 250]), torch.uint8, torch.Size([4]))
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.quantize_8bit(x, signed=signed)
    return result


def dequantize_8bit(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Dequantise the result of ``quantize_8bit``; the values are within 1e-6 of those of bitsandbytes.

    Args:
        codes: any shape, uint8.
        scale: (ceil(elements / 256)), fp32.
        signed: as given to ``quantize_8bit``.

    Returns:
        A tensor of the shape of codes, fp32.

    Raises:
        RuntimeError: a dtype or shape does not fit.

    Example:
        >>> x = torch.randn(1000)
        >>> codes, scale = shoestring.ops.quantize_8bit(x, signed=True)
        >>> y = shoestring.ops.dequantize_8bit(codes, scale, signed=True)
        >>> torch.allclose(y, x, atol=0.01 * float(scale.max()))
        True
    """
    result: Tensor = torch.ops.shoestring.dequantize_8bit(codes, scale, signed=signed)
    return result


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

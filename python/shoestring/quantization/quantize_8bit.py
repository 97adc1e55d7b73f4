"""Quantisation of optimizer state to 8-bit codes with one scale per block."""

import torch
from torch import Tensor

__all__ = ["dequantize_8bit", "quantize_8bit"]

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

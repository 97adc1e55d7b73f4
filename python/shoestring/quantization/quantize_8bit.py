"""The 8-bit codes that the state of optimizers may be kept in."""

import torch
from torch import Tensor

STATE_BLOCK = 256  # elements that share a scale; each parameter's state begins at a multiple of it


def quantize_8bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Block-wise 8-bit codes of x: nearest in a dynamic map to ``x / scale``, scale being a block's largest magnitude.

    The codes are those of bitsandbytes (block size 256), but that a positive number never becomes zero in the unsigned
    map: a second moment of zero would make its update infinite.

    Args:
        x: any shape, fp32; not negative for ``signed=False``.
        signed: the map for first moments; otherwise that for second moments.

    Returns:
        codes (x's shape, uint8) and scale (ceil(elements / 256), fp32; blocks run over the elements in their order).

    Raises:
        RuntimeError: x is not fp32.

    The map is that of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
    """
    result: tuple[Tensor, Tensor] = torch.ops.shoestring.quantize_8bit(x, signed=signed)
    return result


def dequantize_8bit(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of ``quantize_8bit``'s codes (any shape, uint8) and scale: within 1e-6 of bitsandbytes'.

    Raises:
        RuntimeError: a dtype or shape that does not fit.
    """
    result: Tensor = torch.ops.shoestring.dequantize_8bit(codes, scale, signed=signed)
    return result


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the codes, ascending, fp32: per decade equally spaced means, and zero, and 1.0."""
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade if signed else 2 ** (decade + 1)
        scale = 1 / 10 ** (6 - decade)
        slope = torch.tensor(scale * 0.9 / bins).double().item()  # constants are fp32, as in the kernels
        offset = torch.tensor(scale * (0.1 + 0.45 / bins) - slope * bins).double().item()
        magnitudes = [offset + slope * (bins + j) for j in range(bins)]
        values += magnitudes + ([-m for m in magnitudes] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def quantize_8bit_reference(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, by searching the map."""
    values = dynamic_map(signed)
    middles = (values[1:] + values[:-1]) / 2
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % STATE_BLOCK)).view(-1, STATE_BLOCK)
    scale = blocks.abs().amax(1)
    # A power of two keeps the reciprocal of a tiny scale finite, and changes no code.
    tiny = torch.where(scale < 2.0**-100, 2.0**100, 1.0)
    inverse = torch.where(scale > 0, 1 / (scale * tiny), 0)
    scaled = blocks * tiny[:, None] * inverse[:, None]
    codes = torch.searchsorted(middles, scaled)
    if signed:  # of two equally near codes the one nearer to zero
        codes = torch.where(scaled < 0, torch.searchsorted(middles, scaled, right=True), codes)
    else:
        codes = torch.where(blocks == 0, 0, codes.clamp(min=1))
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), scale


def dequantize_8bit_reference(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The same in plain PyTorch, by looking the codes up."""
    values = dynamic_map(signed)[codes.int()].flatten()
    return (values * scale.repeat_interleave(STATE_BLOCK)[: codes.numel()]).view(codes.shape)

"""Compression of gradients to 8, 4 or 1 bits, with error feedback."""

import torch
from torch import Tensor

__all__ = ["compress_gradient_", "compressed_gradient_bytes", "decompress_mean_"]

# For each number of bits: the elements of a block, and the bytes of its record.
RECORDS = {8: (256, 260), 4: (128, 68), 1: (256, 36)}


def compressed_gradient_bytes(numel: int, *, bits: int) -> int:
    """Return the number of bytes of a compressed gradient.

    Args:
        numel: the number of elements.
        bits: 8 (260 bytes per 256 elements), 4 (68 bytes per 128) or 1 (36 bytes per 256).

    Returns:
        the bytes of whole records, one for each block of elements.

    Raises:
        ValueError: another number of bits, or a negative number of elements.

    Example:
        >>> shoestring.ops.compressed_gradient_bytes(1 << 20, bits=4)
        557056
    """
    if bits not in RECORDS:
        raise ValueError(f"compressed_gradient_bytes: bits: expected 8, 4 or 1, received {bits}")
    if numel < 0:
        raise ValueError(f"compressed_gradient_bytes: numel: expected at least 0, received {numel}")
    block, record = RECORDS[bits]
    return (numel + block - 1) // block * record


def compress_gradient_(error: Tensor, gradient: Tensor, codes: Tensor, *, bits: int) -> None:
    """Compress a gradient to 8, 4 or 1 bits, and keep in ``error`` what the codes leave out.

    Adds the gradient to ``error``, writes the codes of the sums to ``codes``, and subtracts the values of the
    codes from ``error``, in one pass over memory. Over many steps, the values of all codes and the last error
    add up to the sum of all gradients. With 8 and 4 bits, the subtraction is exact in fp32.

    Each block of elements has a record in ``codes``: its fp32 scale, and then its codes.

    ====  ==================  ============================  ==================
    bits  elements of a       values of an element          bytes of a record
          block
    ====  ==================  ============================  ==================
    8     256                 -127 to 127 times the scale   4 + 256
    4     128                 -7 to 7 times the scale       4 + 64
    1     256                 the scale or minus the scale  4 + 32
    ====  ==================  ============================  ==================

    The scale of 8 and 4 bits is the largest magnitude over 127 or 7, rounded up to 16 significant bits. A
    block of magnitudes below 2^-100 has the scale 0, and stays in ``error``. The scale of 1 bit is the mean
    magnitude. A block with NaN, with infinity, or with magnitudes (1 bit: a sum of magnitudes) from 2^127 on
    has the scale NaN: it decompresses to NaN, and its errors become 0, so that later steps are not affected.

    Args:
        error: (any shape), fp32, contiguous, with as many elements as gradient. Start with zeros. It changes.
        gradient: (any shape), fp32, bf16 or fp16.
        codes: (``compressed_gradient_bytes(gradient.numel(), bits=bits)``), uint8, contiguous. It changes.
        bits: 8, 4 or 1.

    Raises:
        RuntimeError: a dtype, shape or device does not fit.
        ValueError: another number of bits.

    Source: 1-bit SGD (Seide et al., 2014), "Error Feedback Fixes SignSGD" (arXiv 1901.09847).

    Example:
        >>> gradient, error = torch.randn(1000), torch.zeros(1000)
        >>> codes = torch.empty(shoestring.ops.compressed_gradient_bytes(1000, bits=8), dtype=torch.uint8)
        >>> shoestring.ops.compress_gradient_(error, gradient, codes, bits=8)
        >>> sent = torch.empty(1000)
        >>> shoestring.ops.decompress_mean_(sent, codes[None], bits=8)
        >>> torch.equal(sent + error, gradient)
        True
    """
    torch.ops.shoestring.compress_gradient_(error, gradient, codes, bits=bits)


def decompress_mean_(out: Tensor, codes: Tensor, *, bits: int) -> None:
    """Write the mean of compressed gradients to ``out``.

    Args:
        out: (any shape), fp32, bf16 or fp16, contiguous. It changes.
        codes: (ranks, bytes), uint8. Each row is a result of ``compress_gradient_`` for as many elements as
            out has. Bytes beyond them are ignored.
        bits: 8, 4 or 1, as given to ``compress_gradient_``.

    Values are added in fp32 in the order of the rows, multiplied by 1 / ranks, and rounded to out's dtype.

    Raises:
        RuntimeError: a dtype, shape or device does not fit.
        ValueError: another number of bits.

    Example:
        >>> codes = torch.empty(2, shoestring.ops.compressed_gradient_bytes(256, bits=1), dtype=torch.uint8)
        >>> for row, value in zip(codes, (1.0, 3.0)):
        ...     shoestring.ops.compress_gradient_(torch.zeros(256), torch.full((256,), value), row, bits=1)
        >>> out = torch.empty(256)
        >>> shoestring.ops.decompress_mean_(out, codes, bits=1)
        >>> out[0]
        tensor(2.)
    """
    torch.ops.shoestring.decompress_mean_(out, codes, bits=bits)

"""Fake quantisation: the values of a quantised tensor, with a gradient that trains the dense tensor."""

import torch
from torch import Tensor

__all__ = ["fake_quantize"]


def fake_quantize(
    x: Tensor, quant_type: str = "nf4", block_size: int | None = None, double_quant: bool = False
) -> Tensor:
    """Quantise x and dequantise the result, for quantisation-aware training.

    The result equals, bit for bit, ``quantize_4bit(x, ...).dequantize()`` or
    ``quantize_int8(x).dequantize()``. Codes and scales are not stored: x is read and the result is written in
    one pass. With ``double_quant``, codes of half a byte per element are stored temporarily.

    Quantisation is a step function, whose derivative is zero almost everywhere. The straight-through
    estimator takes it for the identity: the gradient of the result is passed on to x unchanged, for every
    element. "nf4", "fp4" and "int8" scale each block or row by its largest magnitude, so no element is
    clipped. The fit of "int4" may place the extremes of a block outside its grid. These elements receive
    their gradient as well, since the grid follows them.

    Args:
        x: any shape, for "int8" (..., columns); fp32, bf16 or fp16, any strides.
        quant_type: "nf4", "fp4", "int4" or "int8"; see :func:`quantize_4bit` and :func:`quantize_int8`.
        block_size: for 4 bits, the number of consecutive elements of the flattened x that share a scale, a
            power of two from 32 to 4096; None is 64. An int8 row has one scale.
        double_quant: for "nf4" and "fp4": also quantise the scales to 8 bits (double quantisation).

    Returns:
        A contiguous tensor with the shape and dtype of x. A NaN or an infinity has the effect that it has in
        the quantised tensor. Differentiable any number of times; nothing is saved for backward.

    Raises:
        RuntimeError: the dtype, the shape or an option is not supported.

    Example:
        >>> weight = torch.randn(64, 128, requires_grad=True)
        >>> y = shoestring.fake_quantize(weight, "int8")
        >>> torch.equal(y, shoestring.quantize_int8(weight).dequantize())
        True
        >>> y.sum().backward()
        >>> bool((weight.grad == 1).all())
        True

    Reference:
        Bengio, Leonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons for
        Conditional Computation, 2013, arXiv 1308.3432: the straight-through estimator.
    """
    result: Tensor = torch.ops.shoestring.fake_quantize(
        x, quant_type=quant_type, block_size=block_size, double_quant=double_quant
    )
    return result

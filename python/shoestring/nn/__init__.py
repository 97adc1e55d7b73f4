"""Modules: drop-in counterparts of torch.nn's."""

from shoestring.nn.quantized_linear import QuantizedLinear

__all__ = ["QuantizedLinear"]

"""Modules: drop-in counterparts of torch.nn's."""

from shoestring.nn.norm import LayerNorm, RMSNorm
from shoestring.nn.quantized_linear import QuantizedLinear

__all__ = ["LayerNorm", "QuantizedLinear", "RMSNorm"]

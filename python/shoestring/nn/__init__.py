"""Modules: drop-in counterparts of torch.nn's."""

from shoestring.nn.attention import Attention
from shoestring.nn.gated_mlp import GatedMLP
from shoestring.nn.norm import LayerNorm, RMSNorm
from shoestring.nn.quantized_linear import QuantizedLinear

__all__ = ["Attention", "GatedMLP", "LayerNorm", "QuantizedLinear", "RMSNorm"]

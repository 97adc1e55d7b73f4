"""Modules that use shoestring's operators: attention, gated MLP, norms and a quantised linear layer."""

from shoestring.blocks.attention import Attention
from shoestring.blocks.gated_mlp import GatedMLP
from shoestring.layers.norm_module import LayerNorm, RMSNorm
from shoestring.quantization.quantized_linear_module import QuantizedLinear

__all__ = ["Attention", "GatedMLP", "LayerNorm", "QuantizedLinear", "RMSNorm"]

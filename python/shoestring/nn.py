"""Modules that use shoestring's operators: attention, gated MLP, norms, linear and quantised linear layers."""

from shoestring.blocks.attention import Attention
from shoestring.blocks.gated_mlp import GatedMLP
from shoestring.gemm.linear_module import Linear
from shoestring.layers.norm_module import LayerNorm, RMSNorm
from shoestring.quantization.fake_quantized_linear_module import FakeQuantizedLinear
from shoestring.quantization.quantized_linear_module import QuantizedLinear

__all__ = [
    "Attention",
    "FakeQuantizedLinear",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "QuantizedLinear",
    "RMSNorm",
]

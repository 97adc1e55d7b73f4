"""Modules that use shoestring's operators, initial values of weights, and changes of a model before its training."""

import sys

from shoestring.blocks.attention import Attention
from shoestring.blocks.gated_mlp import GatedMLP
from shoestring.checkpoint.tiled_layers import TiledEmbedding, TiledLinear
from shoestring.experts.experts_module import Experts
from shoestring.experts.mixture_of_depths_module import DepthRoute, MixtureOfDepths
from shoestring.experts.moe_module import MoE
from shoestring.experts.router_module import Router
from shoestring.gemm.linear_module import Linear
from shoestring.layers import init
from shoestring.layers.batch_norm_bias import FoldReport, fold_bias_before_batch_norm
from shoestring.layers.norm_module import LayerNorm, RMSNorm
from shoestring.layers.swap_head import swap_head
from shoestring.quantization.fake_quantized_linear_module import FakeQuantizedLinear
from shoestring.quantization.quantized_linear_module import QuantizedLinear

# This module is one file, so the import system does not find `shoestring.nn.init` by itself.
sys.modules["shoestring.nn.init"] = init

__all__ = [
    "Attention",
    "DepthRoute",
    "Experts",
    "FakeQuantizedLinear",
    "FoldReport",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "MixtureOfDepths",
    "MoE",
    "QuantizedLinear",
    "RMSNorm",
    "Router",
    "TiledEmbedding",
    "TiledLinear",
    "fold_bias_before_batch_norm",
    "init",
    "swap_head",
]

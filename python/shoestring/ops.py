"""The operators as Python functions: wrappers of torch.ops.shoestring."""

from shoestring.adapters.lora_linear import (
    LoraWeight,
    lora_linear,
    lora_linear_group,
    lora_weight_norm,
)
from shoestring.attention.attention import AttentionResult, attention
from shoestring.gemm.addmm import addmm_
from shoestring.gemm.linear import linear, linear_group
from shoestring.layers.embedding import embedding
from shoestring.layers.geglu import geglu
from shoestring.layers.gelu import gelu
from shoestring.layers.layer_norm import (
    add_layer_norm,
    layer_norm,
)
from shoestring.layers.rms_norm import add_rms_norm, rms_norm
from shoestring.layers.rope import rope
from shoestring.layers.seeded_dropout import seeded_dropout
from shoestring.layers.swiglu import swiglu
from shoestring.losses.cross_entropy import (
    CrossEntropyOptions,
    CrossEntropyStats,
    cross_entropy,
    cross_entropy_with_stats,
)
from shoestring.losses.linear_cross_entropy import (
    LinearCrossEntropyOptions,
    LinearCrossEntropyStats,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
)
from shoestring.losses.linear_distillation import linear_distillation
from shoestring.losses.vocab_parallel import linear_cross_entropy_shard, vocab_parallel_linear_cross_entropy
from shoestring.optim.adafactor import adafactor_
from shoestring.optim.adamw import adamw_
from shoestring.optim.ademamix import ademamix_
from shoestring.optim.came import came_
from shoestring.optim.foreach_norm import foreach_norm
from shoestring.optim.lamb import lamb_
from shoestring.optim.lion import lion_
from shoestring.optim.muon import muon_
from shoestring.optim.schedule_free_adamw import schedule_free_adamw_
from shoestring.optim.sgd import sgd_
from shoestring.quantization.compress_gradient import (
    compress_gradient_,
    compressed_gradient_bytes,
    decompress_mean_,
)
from shoestring.quantization.fake_quantize import fake_quantize
from shoestring.quantization.quantize_4bit import (
    dequantize_4bit,
    quantize_4bit,
)
from shoestring.quantization.quantize_8bit import (
    dequantize_8bit,
    quantize_8bit,
)
from shoestring.quantization.quantize_int8 import (
    dequantize_int8,
    quantize_int8,
)
from shoestring.quantization.quantize_state_4bit import (
    dequantize_state_4bit,
    quantize_state_4bit,
)
from shoestring.quantization.quantized_linear import quantized_linear

__all__ = [
    "AttentionResult",
    "CrossEntropyOptions",
    "CrossEntropyStats",
    "LinearCrossEntropyOptions",
    "LinearCrossEntropyStats",
    "LoraWeight",
    "adafactor_",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "addmm_",
    "ademamix_",
    "attention",
    "came_",
    "compress_gradient_",
    "compressed_gradient_bytes",
    "cross_entropy",
    "cross_entropy_with_stats",
    "decompress_mean_",
    "dequantize_4bit",
    "dequantize_8bit",
    "dequantize_int8",
    "dequantize_state_4bit",
    "embedding",
    "fake_quantize",
    "foreach_norm",
    "geglu",
    "gelu",
    "lamb_",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_shard",
    "linear_cross_entropy_with_stats",
    "linear_distillation",
    "linear_group",
    "lion_",
    "lora_linear",
    "lora_linear_group",
    "lora_weight_norm",
    "muon_",
    "quantize_4bit",
    "quantize_8bit",
    "quantize_int8",
    "quantize_state_4bit",
    "quantized_linear",
    "rms_norm",
    "rope",
    "schedule_free_adamw_",
    "seeded_dropout",
    "sgd_",
    "swiglu",
    "vocab_parallel_linear_cross_entropy",
]

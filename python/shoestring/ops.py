"""The operators as Python functions: wrappers of torch.ops.shoestring, and references in plain PyTorch."""

from shoestring.adapters.lora_linear import (
    LoraWeight,
    lora_linear,
    lora_linear_group,
    lora_linear_reference,
    lora_weight_norm,
    lora_weight_norm_reference,
)
from shoestring.attention.attention import AttentionResult, attention, attention_reference
from shoestring.gemm.addmm import addmm_, addmm_reference
from shoestring.gemm.linear import linear, linear_group, linear_reference
from shoestring.layers.embedding import embedding, embedding_reference
from shoestring.layers.geglu import geglu, geglu_reference
from shoestring.layers.gelu import gelu, gelu_reference
from shoestring.layers.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from shoestring.layers.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from shoestring.layers.rope import rope, rope_reference
from shoestring.layers.seeded_dropout import seeded_dropout, seeded_dropout_reference
from shoestring.layers.swiglu import swiglu, swiglu_reference
from shoestring.losses.cross_entropy import (
    CrossEntropyOptions,
    CrossEntropyStats,
    cross_entropy,
    cross_entropy_reference,
    cross_entropy_with_stats,
)
from shoestring.losses.linear_cross_entropy import (
    LinearCrossEntropyOptions,
    LinearCrossEntropyStats,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_with_stats,
)
from shoestring.losses.linear_distillation import linear_distillation, linear_distillation_reference
from shoestring.losses.vocab_parallel import linear_cross_entropy_shard, vocab_parallel_linear_cross_entropy
from shoestring.optim.adafactor import adafactor_, adafactor_reference
from shoestring.optim.adamw import adamw_, adamw_reference
from shoestring.optim.ademamix import ademamix_, ademamix_reference
from shoestring.optim.came import came_, came_reference
from shoestring.optim.foreach_norm import foreach_norm, foreach_norm_reference
from shoestring.optim.lamb import lamb_, lamb_reference
from shoestring.optim.lion import lion_, lion_reference
from shoestring.optim.muon import muon_, muon_reference
from shoestring.optim.schedule_free_adamw import schedule_free_adamw_, schedule_free_adamw_reference
from shoestring.optim.sgd import sgd_, sgd_reference
from shoestring.quantization.compress_gradient import (
    compress_gradient_,
    compress_gradient_reference,
    compressed_gradient_bytes,
    decompress_mean_,
    decompress_mean_reference,
)
from shoestring.quantization.fake_quantize import fake_quantize, fake_quantize_reference
from shoestring.quantization.quantize_4bit import (
    dequantize_4bit,
    dequantize_4bit_reference,
    quantize_4bit,
    quantize_4bit_reference,
)
from shoestring.quantization.quantize_8bit import (
    dequantize_8bit,
    dequantize_8bit_reference,
    quantize_8bit,
    quantize_8bit_reference,
)
from shoestring.quantization.quantize_int8 import (
    dequantize_int8,
    dequantize_int8_reference,
    quantize_int8,
    quantize_int8_reference,
)
from shoestring.quantization.quantize_state_4bit import (
    dequantize_state_4bit,
    dequantize_state_4bit_reference,
    quantize_state_4bit,
    quantize_state_4bit_reference,
)
from shoestring.quantization.quantized_linear import quantized_linear, quantized_linear_reference

__all__ = [
    "AttentionResult",
    "CrossEntropyOptions",
    "CrossEntropyStats",
    "LinearCrossEntropyOptions",
    "LinearCrossEntropyStats",
    "LoraWeight",
    "adafactor_",
    "adafactor_reference",
    "adamw_",
    "adamw_reference",
    "add_layer_norm",
    "add_layer_norm_reference",
    "add_rms_norm",
    "add_rms_norm_reference",
    "addmm_",
    "addmm_reference",
    "ademamix_",
    "ademamix_reference",
    "attention",
    "attention_reference",
    "came_",
    "came_reference",
    "compress_gradient_",
    "compress_gradient_reference",
    "compressed_gradient_bytes",
    "cross_entropy",
    "cross_entropy_reference",
    "cross_entropy_with_stats",
    "decompress_mean_",
    "decompress_mean_reference",
    "dequantize_4bit",
    "dequantize_4bit_reference",
    "dequantize_8bit",
    "dequantize_8bit_reference",
    "dequantize_int8",
    "dequantize_int8_reference",
    "dequantize_state_4bit",
    "dequantize_state_4bit_reference",
    "embedding",
    "embedding_reference",
    "fake_quantize",
    "fake_quantize_reference",
    "foreach_norm",
    "foreach_norm_reference",
    "geglu",
    "geglu_reference",
    "gelu",
    "gelu_reference",
    "lamb_",
    "lamb_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_cross_entropy_shard",
    "linear_cross_entropy_with_stats",
    "linear_distillation",
    "linear_distillation_reference",
    "linear_group",
    "linear_reference",
    "lion_",
    "lion_reference",
    "lora_linear",
    "lora_linear_group",
    "lora_linear_reference",
    "lora_weight_norm",
    "lora_weight_norm_reference",
    "muon_",
    "muon_reference",
    "quantize_4bit",
    "quantize_4bit_reference",
    "quantize_8bit",
    "quantize_8bit_reference",
    "quantize_int8",
    "quantize_int8_reference",
    "quantize_state_4bit",
    "quantize_state_4bit_reference",
    "quantized_linear",
    "quantized_linear_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "schedule_free_adamw_",
    "schedule_free_adamw_reference",
    "seeded_dropout",
    "seeded_dropout_reference",
    "sgd_",
    "sgd_reference",
    "swiglu",
    "swiglu_reference",
    "vocab_parallel_linear_cross_entropy",
]

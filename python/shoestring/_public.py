"""The public names of the package ``shoestring``.

Importing this module imports PyTorch and registers the operators.
"""

from shoestring import _load

build = _load.load()
__version__ = build.version
cmake_prefix_path = str(_load.PACKAGE / "share" / "cmake")

from shoestring import callbacks, diffusion, distributed, lora, nn, optim  # noqa: E402
from shoestring.checkpoint import (  # noqa: E402
    CheckpointReport,
    OffloadedWeights,
    TiledLayers,
    checkpoint,
    checkpoint_model,
    checkpoint_sequential,
    offload_activations,
    offload_weights,
    tag_activation,
    tile_layers,
    tiled,
    tiled_features,
)
from shoestring.core.host_allocator import (  # noqa: E402
    HostAllocator,
    HostAllocatorStats,
    host_allocator,
)
from shoestring.distributed.expert_parallel import ExpertParallelReport, expert_parallel  # noqa: E402
from shoestring.distributed.parallelize import ParallelReport, parallelize  # noqa: E402
from shoestring.experts.upcycle import UpcycleReport, upcycle  # noqa: E402
from shoestring.integrations.quantized_training import (  # noqa: E402
    convert_quantized,
    prepare_quantized,
)
from shoestring.integrations.transformers import (  # noqa: E402
    PatchReport,
    load_quantized,
    patch,
    register_attention,
    register_experts,
    save_quantized,
)
from shoestring.layers.stochastic_depth import stochastic_depth, stochastic_depth_rate  # noqa: E402
from shoestring.ops import (  # noqa: E402
    ExpertLora,
    add_layer_norm,
    add_rms_norm,
    attention,
    cross_entropy,
    cross_entropy_with_stats,
    dequantize_4bit,
    dequantize_int8,
    embedding,
    fake_quantize,
    geglu,
    gelu,
    grouped_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_cross_entropy_shard,
    linear_cross_entropy_with_stats,
    linear_distillation,
    linear_group,
    lora_linear,
    lora_linear_group,
    lora_weight_norm,
    moe_experts,
    moe_route,
    moe_sort,
    quantize_4bit,
    quantize_int8,
    quantized_linear,
    rms_norm,
    rope,
    seeded_dropout,
    swiglu,
    vocab_parallel_linear_cross_entropy,
)
from shoestring.planning.machine import Machine, hardware_profile  # noqa: E402
from shoestring.planning.measure import measure_machine  # noqa: E402
from shoestring.planning.tiles import plan_tiles  # noqa: E402
from shoestring.planning.training_plan import (  # noqa: E402
    AppliedPlan,
    PlanCheck,
    TrainingPlan,
    plan_training,
)
from shoestring.quantization.quantized_stacks import ExpertCount, count_experts  # noqa: E402
from shoestring.quantization.quantized_tensor import QuantizedTensor  # noqa: E402
from shoestring.runs.fast_defaults import FastDefaults, MeasuredSwitch, fast_defaults  # noqa: E402
from shoestring.runs.find_batch_size import (  # noqa: E402
    BatchSizeSearch,
    BatchTrial,
    MemoryAdvice,
    find_batch_size,
    memory_advice,
)
from shoestring.runs.find_lr import LrPass, LrRange, find_lr  # noqa: E402
from shoestring.runs.monitor import Monitor  # noqa: E402
from shoestring.runs.monitor_report import MonitorFinding, MonitorReport  # noqa: E402
from shoestring.runs.training_file import TrainingPosition, load_training, save_training  # noqa: E402

__all__ = [
    "AppliedPlan",
    "BatchSizeSearch",
    "BatchTrial",
    "CheckpointReport",
    "ExpertCount",
    "ExpertLora",
    "ExpertParallelReport",
    "FastDefaults",
    "HostAllocator",
    "HostAllocatorStats",
    "LrPass",
    "LrRange",
    "Machine",
    "MeasuredSwitch",
    "MemoryAdvice",
    "Monitor",
    "MonitorFinding",
    "MonitorReport",
    "OffloadedWeights",
    "ParallelReport",
    "PatchReport",
    "PlanCheck",
    "QuantizedTensor",
    "TiledLayers",
    "TrainingPlan",
    "TrainingPosition",
    "UpcycleReport",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "build",
    "callbacks",
    "checkpoint",
    "checkpoint_model",
    "checkpoint_sequential",
    "cmake_prefix_path",
    "convert_quantized",
    "count_experts",
    "cross_entropy",
    "cross_entropy_with_stats",
    "dequantize_4bit",
    "dequantize_int8",
    "diffusion",
    "distributed",
    "embedding",
    "expert_parallel",
    "fake_quantize",
    "fast_defaults",
    "find_batch_size",
    "find_lr",
    "geglu",
    "gelu",
    "grouped_linear",
    "hardware_profile",
    "host_allocator",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_shard",
    "linear_cross_entropy_with_stats",
    "linear_distillation",
    "linear_group",
    "load_quantized",
    "load_training",
    "lora",
    "lora_linear",
    "lora_linear_group",
    "lora_weight_norm",
    "measure_machine",
    "memory_advice",
    "moe_experts",
    "moe_route",
    "moe_sort",
    "nn",
    "offload_activations",
    "offload_weights",
    "optim",
    "parallelize",
    "patch",
    "plan_tiles",
    "plan_training",
    "prepare_quantized",
    "quantize_4bit",
    "quantize_int8",
    "quantized_linear",
    "register_attention",
    "register_experts",
    "rms_norm",
    "rope",
    "save_quantized",
    "save_training",
    "seeded_dropout",
    "stochastic_depth",
    "stochastic_depth_rate",
    "swiglu",
    "tag_activation",
    "tile_layers",
    "tiled",
    "tiled_features",
    "upcycle",
    "vocab_parallel_linear_cross_entropy",
]

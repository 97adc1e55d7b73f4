"""The operators as Python functions: wrappers of torch.ops.shoestring."""

# The modules of operators list their public names in __all__. Optimizer steps are operators without a function:
# the classes of shoestring.optim call them.
# ruff: noqa: F403
from shoestring.adapters.lora_linear import *
from shoestring.attention.attention import *
from shoestring.experts.grouped_linear import *
from shoestring.experts.moe_experts import *
from shoestring.experts.moe_route import *
from shoestring.experts.moe_sort import *
from shoestring.gemm.addmm import *
from shoestring.gemm.linear import *
from shoestring.layers.embedding import *
from shoestring.layers.geglu import *
from shoestring.layers.gelu import *
from shoestring.layers.layer_norm import *
from shoestring.layers.rms_norm import *
from shoestring.layers.rope import *
from shoestring.layers.seeded_dropout import *
from shoestring.layers.swiglu import *
from shoestring.losses.cross_entropy import *
from shoestring.losses.linear_cross_entropy import *
from shoestring.losses.linear_distillation import *
from shoestring.losses.vocab_parallel import *
from shoestring.optim.foreach_norm import *
from shoestring.quantization.compress_gradient import *
from shoestring.quantization.fake_quantize import *
from shoestring.quantization.quantize_4bit import *
from shoestring.quantization.quantize_8bit import *
from shoestring.quantization.quantize_int8 import *
from shoestring.quantization.quantize_state_4bit import *
from shoestring.quantization.quantized_linear import *

__all__ = sorted(name for name in globals() if not name.startswith("_"))

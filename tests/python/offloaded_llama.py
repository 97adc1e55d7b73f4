"""A small Llama whose weights tests move to a file."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 5


def llama(dtype: torch.dtype = torch.float32, layers: int = LAYERS, **extra: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    config = LlamaConfig(**{**shape, "num_hidden_layers": layers, "use_cache": False, **extra})
    return LlamaForCausalLM(config).to(dtype).train()


def batch(step: int) -> Tensor:
    return torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(step))

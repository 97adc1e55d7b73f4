"""Tiny models of the architectures of Transformers, with random weights."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# For each model, its class in Transformers without the task, and the changes of the configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "falcon": ("FalconForCausalLM", {"ffn_hidden_size": 48, "new_decoder_architecture": False}),
    "bert": ("BertForSequenceClassification", {"num_labels": 3}),
}


@functools.cache
def _weights(name: str) -> tuple[type[nn.Module], Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    kind, changes = MODELS[name]
    cls = getattr(transformers, kind)
    sizes = {k: v for k, v in SIZES.items() if name != "gpt2" or "hidden" not in k}
    config = cls.config_class(**sizes | changes)
    torch.manual_seed(0)
    return cls, config, cls(config).state_dict()


def tiny(name: str) -> nn.Module:
    """Return a new model with always the same weights, in eval mode."""
    cls, config, weights = _weights(name)
    model = cls(config)
    model.load_state_dict(weights)
    return model.eval()


def logits(model: nn.Module, seed: int = 3) -> Tensor:
    """Return the logits of a batch that depends on the seed."""
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    result: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return result

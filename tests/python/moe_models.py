"""Small models of transformers, one for each layout of stacked experts."""

from __future__ import annotations

from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHARED: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# name of the class in transformers, fields of its configuration, and the number of experts in all layers together
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {**COMMON, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
        16,
    ),
    "mixtral": ("Mixtral", {**COMMON, "intermediate_size": 64, "num_local_experts": 4}, 8),
    "olmoe": ("Olmoe", {**COMMON, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}, 8),
    "gpt_oss": (
        "GptOss",
        {
            **COMMON,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "layer_types": ["full_attention"] * 2,
        },
        8,
    ),
    "glm4_moe": ("Glm4Moe", {**COMMON, **SHARED, "head_dim": 16}, 4),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **COMMON,
            **SHARED,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        4,
    ),
}


def moe_model(kind: str, seed: int = 0, **fields: Any) -> Any:
    """Build a model with random weights, whose biases of routers and experts are not zero."""
    import transformers

    prefix, shape, _ = MODELS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**shape, **fields})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in name:
                tensor.normal_(std=0.02)
    return model.eval()

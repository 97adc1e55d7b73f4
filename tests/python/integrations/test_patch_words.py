"""The words in which ``patch`` and the command line tell what is replaced, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
)

import shoestring
from shoestring.training.run.patch_lines import patch_lines

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=2
)


@pytest.mark.parametrize(
    ("config", "left", "attends"),
    [
        (LlamaConfig(**SIZES), "no part of a block", True),
        (GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4), "no part of a block", True),
        (Phi3Config(**SIZES), "2 x Phi3MLP", True),
        (MixtralConfig(**SIZES), "2 x MixtralTopKRouter", True),
        (Qwen2MoeConfig(**SIZES, **EXPERTS), "2 x Qwen2MoeTopKRouter; 2 x Linear", True),
        (
            Mamba2Config(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1),
            "2 x Mamba2Mixer",
            False,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)  # fmt: skip
def test_two_lines_name_every_part(config: PretrainedConfig, left: str, attends: bool) -> None:
    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    # The layers that linear=None would change depend on the CPU.
    report = shoestring.patch(model, logits=False, linear=False)
    done, rest = patch_lines(model, report)
    assert rest == f"left to PyTorch: {left}" and done.startswith(
        "patched: loss without logits, from lm_head; "
    )
    # a model of recurrences alone is not told that its attention is replaced
    assert ("attention of shoestring" in done) == attends
    assert model.config._attn_implementation == ("shoestring" if attends else before)
    report.undo()
    assert model.config._attn_implementation == before
    assert patch_lines(model, report)[0] == "patched: nothing"


@pytest.mark.parametrize("model", ["folder/with/a/model", None, 5])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("shoestring.patch", shoestring.patch),
        ("parallelize", shoestring.parallelize),
        ("checkpoint_model", shoestring.checkpoint_model),
        ("offload_weights", lambda model: shoestring.offload_weights(model, to="cpu")),
        ("lora.apply", shoestring.lora.apply),
        ("lora.load_adapter", lambda model: shoestring.lora.load_adapter(model, "folder")),
        ("lora.save_adapter", lambda model: shoestring.lora.save_adapter(model, "folder")),
        ("lora.merge", shoestring.lora.merge),
        ("Averages", shoestring.optim.Averages),
        ("Unfreezing", lambda model: shoestring.optim.Unfreezing(model, {"*": 0})),
    ],
)
def test_what_is_no_model_is_refused(name: str, call: Callable[[Any], Any], model: Any) -> None:
    advice = "Load the model from there first" if isinstance(model, str) else "Pass the model itself"
    with pytest.raises(TypeError, match=f"^{name}: model: expected a torch.nn.Module, received .*. {advice}"):
        call(model)

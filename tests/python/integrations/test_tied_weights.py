"""Weights that a configuration ties and files store with different values: loading keeps what is stored.

Merging an adapter of the embedding or of the output layer unties the two in the configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoestring
from lora_models import llama, logits
from shoestring import lora
from shoestring.integrations.transformers.load import _by_values, load_dense
from shoestring.integrations.transformers.reader import TensorReader, stored_tensors

# Options of lora.apply, and whether the merged embedding and output layer still share one weight.
ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "head": ({"target_modules": ["lm_head"]}, False),
    "embedding": ({"target_modules": ["embed_tokens"]}, False),
    "pissa": ({"target_modules": ["lm_head"], "init": "pissa"}, False),
    "trained_head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "trained_embedding": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "trained_both": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        True,
    ),
    "tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, True),
    "tokens_of_head": ({"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3]}}, False),
    "inside": ({"target_modules": ["q_proj"]}, True),
}


def randomise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter) * parameter.requires_grad


def ends(model: Any) -> tuple[Tensor, Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_reloads(kind: str, tmp_path: Path) -> None:
    options, tied = ADAPTERS[kind]
    model = llama(tied=True)
    former = logits(model)
    randomise(lora.apply(model, rank=2, **options))
    expected = logits(model)
    assert not torch.allclose(expected, former, rtol=1e-3)
    lora.merge(model)
    assert (ends(model)[0] is ends(model)[1]) == tied == model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == tied
    from transformers import AutoModelForCausalLM

    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        load_dense(tmp_path, dtype=torch.float32, device="cpu"),
    ):
        assert torch.allclose(logits(loaded), expected, atol=1e-4)
    quantised = shoestring.load_quantized(tmp_path, dtype=torch.float32)
    assert all(map(torch.equal, ends(quantised), ends(model)))
    assert (ends(quantised)[0] is ends(quantised)[1]) == tied == quantised.config.tie_word_embeddings
    lora.unmerge(model)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert model.config.tie_word_embeddings or kind == "pissa"  # PiSSA gives the head a weight of its own
    lora.delete_adapter(model, "default")
    assert torch.allclose(logits(model), former, atol=1e-4)


@pytest.mark.parametrize("away", [False, True])
def test_loading_keeps_what_is_stored(away: bool, tmp_path: Path) -> None:
    """config.json says that the output layer is tied, as in a folder of older tools; the files say otherwise."""
    from transformers import AutoModelForCausalLM

    llama(tied=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = torch.randn_like(state["model.embed_tokens.weight"])
    save_file(state, file, metadata={"format": "pt"})
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    dense = load_dense(tmp_path, dtype=torch.float32, device="cpu")
    assert torch.allclose(logits(dense), expected, atol=1e-5)
    skipped = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    to = {"to": f"nvme:{tmp_path}"} if away else {}
    model = shoestring.load_quantized(tmp_path, dtype=torch.float32, skip_modules=skipped, **to)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert not model.config.tie_word_embeddings
    # Equal values, which older versions of transformers stored twice, are loaded once.
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, file, metadata={"format": "pt"})
    model = load_dense(tmp_path, dtype=torch.float32, device="cpu")
    assert ends(model)[0] is ends(model)[1] and model.config.tie_word_embeddings


def test_a_saved_quantised_model_keeps_both(tmp_path: Path) -> None:
    model = llama(tied=True)
    randomise(lora.apply(model, rank=2, target_modules=["lm_head"]))
    lora.merge(model)
    model.save_pretrained(tmp_path / "merged")
    model = shoestring.load_quantized(tmp_path / "merged", dtype=torch.float32)
    shoestring.save_quantized(model, tmp_path / "quantised")
    again = shoestring.load_quantized(tmp_path / "quantised", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_initialisation_changes_its_own_layer_alone(init: str) -> None:
    model = llama(tied=True)
    expected = logits(model)
    lora.apply(model, rank=2, target_modules=["lm_head"], init=init)
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_one_module_cannot_have_two_values(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    model = nn.ModuleDict({"first": layer, "second": layer})
    for second, fits in ((torch.eye(2), True), (torch.ones(2, 2), False)):
        save_file({"first.weight": torch.eye(2), "second.weight": second}, tmp_path / "model.safetensors")
        names, like = ["first.weight", "second.weight"], layer.weight
        with TensorReader(stored_tensors(tmp_path)) as reader:
            if fits:
                assert _by_values(model, [(names, like)], reader, {}, tmp_path) == [(names, like)]
                continue
            with pytest.raises(
                ValueError, match="expected the same values for first.weight and second.weight"
            ):
                _by_values(model, [(names, like)], reader, {}, tmp_path)


def test_one_file_counts_beside_the_index_of_an_earlier_model(tmp_path: Path) -> None:
    """The index remains if a save of one file over a sharded model is killed. transformers and C++ read the file."""
    llama().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(stored_tensors(tmp_path)) > 10
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert list(stored_tensors(tmp_path)) == ["lm_head.weight"]


@pytest.mark.parametrize("target", ["shared", "lm_head", "embed_tokens"])
def test_a_merged_encoder_decoder_reloads(target: str, tmp_path: Path) -> None:
    """Embedding, encoder, decoder and output layer share one weight, of which the merge changes some."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    randomise(lora.apply(model, rank=2, target_modules=[target], init="random"))
    expected = logits(model)
    lora.merge(model)
    model.save_pretrained(tmp_path)
    again = BartForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.allclose(logits(again), expected, atol=1e-4)
    lora.unmerge(model)
    assert torch.allclose(logits(model), expected, atol=1e-4)

"""Test trainable_token_indices: trained rows of embeddings and of heads that are tied to them."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_models import assert_files_agree, llama, logits
from shoestring import lora

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
ATTENTION = ["q_proj", "v_proj"]


@functools.cache
def _gemma() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


MODELS: dict[str, Any] = {
    "tied": lambda: llama(tied=True),
    "untied": llama,
    "gemma": lambda: copy.deepcopy(_gemma()),
}
IDS = [3, 11, 5, 0]
CASES: dict[str, tuple[str, Any]] = {
    "tied": ("tied", IDS),
    "untied": ("untied", IDS),
    "head": ("untied", {"embed_tokens": IDS, "lm_head": [7, 2]}),
    "both of tied": ("tied", {"embed_tokens": IDS, "lm_head": IDS}),
    "gemma": ("gemma", IDS),
}


def trained(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {n.split(".default")[0].removeprefix("base_model.model."): p for n, p in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_as_in_peft(case: str, tmp_path: Path) -> None:
    kind, indices = CASES[case]
    config = peft.LoraConfig(r=2, target_modules=ATTENTION, trainable_token_indices=indices)
    ours = lora.apply(MODELS[kind](), copy.deepcopy(config))
    theirs = peft.get_peft_model(MODELS[kind](), copy.deepcopy(config)).eval()
    mine, peers = trained(ours), trained(theirs)
    assert mine.keys() == {name.replace("token_adapter.", "") for name in peers}
    torch.testing.assert_close(logits(ours), logits(MODELS[kind]()), rtol=1e-5, atol=1e-6)
    pairs = {name: peers[name.replace("trainable_tokens", "token_adapter.trainable_tokens")] for name in mine}
    for name, value in mine.items():
        if "tokens_delta" in name:
            torch.testing.assert_close(value, pairs[name])
        value.data += 0.05 * torch.randn_like(value)
        pairs[name].data.copy_(value)
    ids = torch.tensor([[3, 4, 11, 90], [0, 5, 7, 2]])
    for _ in range(2):  # in the second round with other tokens
        outputs = [model(ids, labels=ids) for model in (ours, theirs)]
        torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-5, atol=2e-6)
        grads = [
            torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
            for out, leaves in zip(outputs, (mine, pairs), strict=True)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        ids = ids + 1
    expected = logits(ours)
    assert_files_agree(ours, tmp_path, MODELS[kind])
    files = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    saved = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert saved["model.embed_tokens"] == IDS and len(saved) == (2 if case == "head" else 1)

    assert torch.equal(logits(copy.deepcopy(ours)), expected)
    with lora.disable_adapter(ours):
        assert torch.equal(logits(ours), logits(MODELS[kind]()))
    lora.merge(ours)
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-5)
    lora.unmerge(ours)
    assert torch.equal(logits(ours), expected)
    lora.delete_adapter(ours, "default")
    assert torch.equal(logits(ours), logits(MODELS[kind]()))
    assert [type(m) for m in ours.modules()] == [type(m) for m in MODELS[kind]().modules()]


def test_copies_and_several_adapters() -> None:
    model = lora.apply(llama(tied=True), rank=2, trainable_token_indices=IDS, quantize="nf4")
    other = copy.deepcopy(model)
    other.model.embed_tokens.trainable_tokens_delta["default"].data += 1
    # The copy's head reads the rows of the copy's embedding.
    assert (logits(other) - logits(model)).abs().max() > 0.1
    lora.apply(model, rank=2, trainable_token_indices=[1], adapter_name="b")
    held = model.model.embed_tokens.trainable_tokens_delta
    assert held["b"].requires_grad and not held["default"].requires_grad
    for names, message in [
        (["default", "b"], "at most one adapter with trained tokens .* of model.embed_tokens")
    ]:
        with pytest.raises(ValueError, match=message):
            lora.set_adapter(model, names)
    with pytest.raises(ValueError, match="received 'b', which has a TokenEmbedding at model.embed_tokens"):
        lora.adapters_per_row(model, ["b"]).__enter__()


def test_errors(tmp_path: Path) -> None:
    for options, message in [
        (
            {"trainable_token_indices": [97]},
            "different indices from 0 to 96 for model.embed_tokens, received 97",
        ),
        ({"trainable_token_indices": [1, 1]}, "received one of them twice"),
        (
            {"trainable_token_indices": {"embed": [1]}},
            "trainable_token_indices: expected names of modules, received 'em",
        ),
        ({"trainable_token_indices": {"norm": [1]}}, "expected dense embeddings .* received model.norm"),
        (
            {"trainable_token_indices": [1], "target_modules": ["embed_tokens"]},
            "expected layers that are not in target_modules or modules_to_save, received model.embed_tokens",
        ),
        (
            {"trainable_token_indices": [1], "target_modules": []},
            "modules besides those of trainable_token_ind",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(llama(), **({"rank": 2, "target_modules": ATTENTION} | options))
    lora.save_adapter(lora.apply(llama(), rank=2, trainable_token_indices=[1, 2]), tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for indices, message in [
        ({"model.embed_tokens": [1, 3]}, "expected the weights that were saved with"),
        ({"model.embed_tokens": ["a"]}, "trainable_token_indices: expected a list of at most .* token ids"),
        (None, "expected the weights that were saved with"),
    ]:
        path.write_text(json.dumps(config | {"trainable_token_indices": indices}))
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(llama(), tmp_path)


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=str)
def test_tied_copies_as_in_peft(names: list[str], tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=ATTENTION, modules_to_save=names, ensure_weight_tying=True)
    ours = lora.apply(llama(tied=True), copy.deepcopy(config))
    theirs = peft.get_peft_model(llama(tied=True), copy.deepcopy(config)).eval()
    mine, peers = (dict(model.named_parameters()) for model in (ours, theirs))
    mine = {name: p for name, p in mine.items() if p.requires_grad and "lora" not in name}
    assert list(mine) == ["model.embed_tokens.modules_to_save.default.weight"]
    copied = mine["model.embed_tokens.modules_to_save.default.weight"]
    assert ours.lm_head.modules_to_save["default"].weight is copied
    other = peers["base_model.model.model.embed_tokens.modules_to_save.default.weight"]
    copied.data += 0.05 * torch.randn_like(copied)
    other.data.copy_(copied)
    ids = torch.randint(97, (2, 7))
    losses = [model(ids, labels=ids).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    grads = [torch.autograd.grad(loss, p)[0] for loss, p in zip(losses, (copied, other), strict=True)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)
    expected = logits(ours)
    assert (expected - logits(llama(tied=True))).abs().max() > 1e-2
    assert_files_agree(ours, tmp_path, lambda: llama(tied=True))
    for folder in ("ours", "theirs"):
        loaded = lora.load_adapter(llama(tied=True), tmp_path / folder)
        held = loaded.model.embed_tokens.modules_to_save["default"].weight
        assert held.requires_grad and loaded.lm_head.modules_to_save["default"].weight is held
    copied_again = copy.deepcopy(ours)
    assert copied_again.lm_head.weight is copied_again.model.embed_tokens.weight
    with lora.disable_adapter(ours):
        assert torch.equal(logits(ours), logits(llama(tied=True)))
    lora.merge(ours)
    assert torch.equal(logits(ours), expected) and ours.lm_head.weight is ours.model.embed_tokens.weight


def test_weight_tying_of_untied_and_adapted_embeddings() -> None:
    model = lora.apply(llama(), rank=2, modules_to_save=["lm_head"], ensure_weight_tying=True)
    assert [n for n in trained(model) if "modules_to_save" in n] == ["lm_head.modules_to_save"]
    with pytest.raises(
        ValueError, match="ensure_weight_tying: .* received model.embed_tokens in target_modules"
    ):
        lora.apply(llama(tied=True), rank=2, target_modules=["embed_tokens"], ensure_weight_tying=True)
    options = {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}
    with pytest.raises(ValueError, match="ensure_weight_tying: .* received lm_head in target_modules"):
        lora.apply(llama(tied=True), rank=2, ensure_weight_tying=True, **options)
    lora.apply(llama(tied=True), rank=2, ensure_weight_tying=True, exclude_modules=["lm_head"], **options)
    indices = {"embed_tokens": [1], "lm_head": [2]}
    with pytest.raises(
        ValueError, match="the same indices for tied layers, .* others for lm_head than for model"
    ):
        lora.apply(llama(tied=True), rank=2, trainable_token_indices=indices, ensure_weight_tying=True)

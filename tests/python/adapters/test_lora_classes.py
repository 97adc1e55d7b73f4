"""Test adapters on GPT-2's Conv1D and on subclasses of nn.Linear and nn.Embedding."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from lora_models import assert_files_agree, logits, randomise, trained
from shoestring import lora

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        SIZES | {"bias": True, "new_decoder_architecture": False},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"attention_bias": True}),
}


class Doubled(nn.Linear):
    """A subclass of nn.Linear that computes something else."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return factor * super().forward(x)


@functools.cache
def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config, model, options = MODELS["llama" if kind == "doubled" else kind]
    built = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    if kind == "doubled":
        for layer in built.model.layers:
            layer.self_attn.q_proj.__class__ = layer.self_attn.o_proj.__class__ = Doubled
    for name, parameter in built.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return built


def build(kind: str) -> nn.Module:
    model = copy.deepcopy(_model(kind))
    torch.manual_seed(5)
    return model


LORA = {"r": 4, "lora_alpha": 6}
CASES: dict[str, tuple[str, Any]] = {
    "gpt2": ("gpt2", lambda: peft.LoraConfig(**LORA, target_modules="all-linear")),
    "gpt2 defaults": ("gpt2", lambda: peft.LoraConfig(**LORA, fan_in_fan_out=True)),
    "gpt2 dora": ("gpt2", lambda: peft.LoraConfig(**LORA, target_modules=["c_attn", "c_fc"], use_dora=True)),
    "gpt2 bias": ("gpt2", lambda: peft.LoraConfig(**LORA, target_modules=["c_fc"], lora_bias=True, bias="lora_only")),
    "gpt2 random": ("gpt2", lambda: peft.LoraConfig(**LORA, init_lora_weights=False, target_modules=["wte", "c_fc"])),
    "gpt2 vera": ("gpt2", lambda: peft.VeraConfig(r=8, target_modules=["c_attn", "mlp.c_proj"])),
    "gpt2 ia3": ("gpt2", lambda: peft.IA3Config()),
    "falcon": ("falcon", lambda: peft.LoraConfig(**LORA, target_modules="all-linear")),
    "falcon dora": ("falcon", lambda: peft.LoraConfig(**LORA, target_modules=["query_key_value"], use_dora=True)),
    "falcon ia3": ("falcon", lambda: peft.IA3Config()),
    "gemma3": ("gemma3", lambda: peft.LoraConfig(**LORA, target_modules=["embed_tokens", "q_proj"])),
    "gemma3 dora": ("gemma3", lambda: peft.LoraConfig(**LORA, target_modules=["embed_tokens"], use_dora=True)),
    "doubled": ("doubled", lambda: peft.LoraConfig(**LORA, target_modules="all-linear")),
    "doubled dora": ("doubled", lambda: peft.LoraConfig(**LORA, target_modules=["q_proj", "o_proj"], use_dora=True)),
    "doubled orthogonal": (
        "doubled",
        lambda: peft.LoraConfig(**LORA, target_modules=["q_proj", "o_proj"], init_lora_weights="orthogonal"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_starts_trains_and_saves_as_peft(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    ours = lora.apply(build(kind), config())
    theirs = peft.get_peft_model(build(kind), config()).eval()
    mine, peers = trained(ours), trained(theirs)
    assert mine.keys() == peers.keys() and mine
    for name, value in mine.items():
        torch.testing.assert_close(value, peers[name], rtol=1e-6, atol=1e-6)
        value.data += 0.05 * torch.randn_like(value)
        peers[name].data.copy_(value)
    expected = logits(ours)
    assert (expected - logits(build(kind))).abs().max() > 1e-3
    torch.testing.assert_close(expected, logits(theirs), rtol=1e-5, atol=2e-6)
    ids = torch.randint(97, (2, 7))
    grads = [
        torch.autograd.grad(m(ids, labels=ids).loss, [p[name] for name in mine])
        for m, p in ((ours, mine), (theirs, peers))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    assert_files_agree(ours, tmp_path, lambda: build(kind))
    merged = copy.deepcopy(ours)
    lora.merge(merged)
    assert [type(m) for m in merged.modules()] == [type(m) for m in build(kind).modules()]
    if kind != "doubled":  # merging assumes a layer that is linear in its weight
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    lora.unmerge(merged)
    assert torch.equal(logits(merged), expected)
    assert all(torch.equal(v, merged.state_dict()[k]) for k, v in ours.state_dict().items())


@pytest.mark.parametrize("kind", ["gpt2", "falcon", "doubled", "gemma3"])
def test_several_adapters_rows_dropout_and_patch(kind: str) -> None:
    targets = ["embed_tokens", "q_proj"] if kind == "gemma3" else "all-linear"
    model = lora.apply(build(kind), rank=2, alpha=4, target_modules=targets)
    lora.apply(model, rank=3, alpha=4, target_modules=targets, dora=True, adapter_name="b")
    randomise(randomise(model), "b")
    alone = {None: logits(build(kind))}
    for name in ("default", "b"):
        lora.set_adapter(model, name)
        alone[name] = logits(model)
    with lora.adapters_per_row(model, ["b", None]):
        mixed = logits(model)
    torch.testing.assert_close(mixed[0], alone["b"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed[1], alone[None][1], rtol=1e-4, atol=1e-5)
    with lora.disable_adapter(model):
        assert torch.equal(logits(model), alone[None])
    report = shoestring.patch(model)
    torch.testing.assert_close(logits(model), alone["b"], rtol=1e-4, atol=1e-5)
    report.undo()
    for name in ("default", "b"):
        lora.delete_adapter(model, name)
    assert torch.equal(logits(model), alone[None])
    assert [type(m) for m in model.modules()] == [type(m) for m in build(kind).modules()]
    model = randomise(lora.apply(build(kind), rank=2, target_modules=targets, dropout=0.5)).train()
    torch.manual_seed(3)
    first = logits(model)
    # Embeddings ignore dropout.
    assert not torch.equal(first, logits(model))


def test_pissa_of_conv1d(tmp_path: Path) -> None:
    """PiSSA leaves the output as it was, and the saved adapter fits the original base."""
    model = lora.apply(build("gpt2"), rank=4, init="pissa", target_modules=["c_attn", "mlp.c_proj"])
    base = logits(build("gpt2"))
    torch.testing.assert_close(logits(model), base, rtol=1e-4, atol=1e-5)
    theirs = peft.get_peft_model(
        build("gpt2"),
        peft.LoraConfig(
            r=4, lora_alpha=32, init_lora_weights="pissa", target_modules=["c_attn", "mlp.c_proj"]
        ),
    )
    for name, value in trained(model).items():
        torch.testing.assert_close(value.abs(), trained(theirs)[name].abs(), rtol=1e-3, atol=1e-5)
    randomise(model)
    lora.save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(build("gpt2"), str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True


def test_quantised_and_refused() -> None:
    model = lora.apply(build("falcon"), rank=2, quantize="nf4", target_modules=["query_key_value"])
    block = model.transformer.h[0]
    assert type(block.mlp.dense_h_to_4h).__name__ == "QuantizedLinear"
    assert "nf4" in repr(block.self_attention.query_key_value)
    assert torch.isfinite(logits(model)).all()
    router = nn.Sequential(type("TopRouter", (nn.Linear,), {})(4, 4))
    attention = nn.TransformerEncoderLayer(8, 2, 16)
    for call, message in [
        (
            lambda: lora.apply(build("gpt2"), rank=2, quantize="nf4"),
            "quantize: expected None for a model with Conv1D layers, such as transformer.h.0.attn.c_attn",
        ),
        (
            lambda: lora.apply(build("doubled"), lora.IA3Options(target_modules=["q_proj"])),
            "target_modules: expected linear layers .* received .*q_proj, a Doubled",
        ),
        (
            lambda: lora.apply(build("doubled"), rank=2, init="pissa"),
            "expected linear layers for 'pissa', received .*q_proj, a Doubled",
        ),
        (lambda: lora.apply(router, target_modules=["0"]), "received 0, a TopRouter"),
        (lambda: lora.apply(attention, target_modules=["out_proj"]), "a NonDynamicallyQuantizableLinear"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    adapted = lora.apply(attention, rank=2)
    assert sorted(n.partition(".")[0] for n in trained(adapted)) == [
        "linear1",
        "linear1",
        "linear2",
        "linear2",
    ]

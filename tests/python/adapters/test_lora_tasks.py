"""Test that every field of PEFT's configurations is known, and those that depend on the model or its task."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_models import llama, logits
from shoestring import lora
from shoestring.adapters import peft_config

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CONFIGS = {
    "LORA": peft.LoraConfig,
    "VERA": peft.VeraConfig,
    "IA3": peft.IA3Config,
    "PREFIX_TUNING": peft.PrefixTuningConfig,
    "PROMPT_TUNING": peft.PromptTuningConfig,
}


@pytest.mark.parametrize("method", peft_config.METHODS)
def test_every_field_has_been_looked_at(method: str) -> None:
    """A field of a newer PEFT makes this test fail until csrc/adapters/config_fields.cpp lists it."""
    known = peft_config.fields_of(method)
    assert known.keys() == {field.name for field in dataclasses.fields(CONFIGS[method])}
    # Each field that is read has an option of its own.
    read = [option for option in known.values() if option]
    options = {field.name for field in dataclasses.fields(peft_config.METHODS[method])}
    assert set(read) <= options and len(set(read)) == len(read)


@functools.cache
def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind.startswith("DistilBert"):
        config = transformers.DistilBertConfig(
            vocab_size=97, dim=32, hidden_dim=48, n_layers=2, n_heads=4, num_labels=3, max_position_embeddings=20,
        )  # fmt: skip
    elif kind.startswith("Roberta"):
        config = transformers.RobertaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_labels=3, max_position_embeddings=20, hidden_dropout_prob=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_labels=3, pad_token_id=0,
        )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def build(kind: str) -> nn.Module:
    model = copy.deepcopy(_model(kind))
    torch.manual_seed(5)  # also if the model was built in this call
    return model


def output(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        result = model(ids)
    return result.start_logits if hasattr(result, "start_logits") else result.logits


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters of a PEFT or shoestring model, by their names in PEFT without "weight"."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.")
            found[name.removesuffix(".weight") if ".lora_" in name else name] = parameter
    return found


TASKS = {
    "SEQ_CLS": ("LlamaForSequenceClassification", ["q_proj", "v_proj"], ["score"]),
    "SEQ_CLS all-linear": ("LlamaForSequenceClassification", "all-linear", ["score"]),
    "SEQ_CLS of modules": ("RobertaForSequenceClassification", "all-linear", ["classifier"]),
    "SEQ_CLS of two": ("DistilBertForSequenceClassification", ["q_lin"], ["pre_classifier", "classifier"]),
    "TOKEN_CLS": ("RobertaForTokenClassification", ["query"], ["classifier"]),
    "QUESTION_ANS": ("LlamaForQuestionAnswering", ["q_proj"], ["qa_outputs"]),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_head_of_a_task_is_trained_and_saved_as_in_peft(name: str, tmp_path: Path) -> None:
    kind, targets, heads = TASKS[name]
    config = peft.LoraConfig(r=4, task_type=name.split()[0], target_modules=targets)
    ours = lora.apply(build(kind), copy.deepcopy(config))
    theirs = peft.get_peft_model(build(kind), copy.deepcopy(config)).eval()
    mine, peers = trained(ours), trained(theirs)
    assert mine.keys() == peers.keys()
    assert all(any(key.startswith(f"{head}.modules_to_save.default") for key in mine) for head in heads)
    for key, value in mine.items():
        torch.testing.assert_close(value, peers[key], rtol=1e-6, atol=1e-6)
        value.data += 0.02 * torch.randn_like(value)
        peers[key].data.copy_(value)
    expected = output(ours)
    assert (expected - output(build(kind))).abs().max() > 1e-3
    torch.testing.assert_close(expected, output(theirs), rtol=1e-6, atol=1e-6)

    lora.save_adapter(ours, tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    files = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    loaded = peft.PeftModel.from_pretrained(build(kind), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(output(loaded), expected, rtol=1e-6, atol=1e-6)
    for folder in ("ours", "theirs"):
        model = lora.load_adapter(build(kind), tmp_path / folder)
        torch.testing.assert_close(output(model), expected, rtol=1e-6, atol=1e-6)
        assert trained(model).keys() == mine.keys()
    saved = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (saved["task_type"], saved["modules_to_save"]) == (name.split()[0], heads)


def test_tasks_of_options_and_other_methods() -> None:
    model = lora.apply(build("LlamaForSequenceClassification"), rank=2, task_type="SEQ_CLS", quantize="nf4")
    assert type(model.score.modules_to_save["default"]) is nn.Linear and model.score.weight.requires_grad
    # PEFT adapts the head before it copies it and raises an error; here the head is left out.
    model = lora.apply(
        build("RobertaForTokenClassification"),
        peft.LoraConfig(task_type="TOKEN_CLS", target_modules="all-linear"),
    )
    assert "classifier.modules_to_save.default.bias" in trained(model)
    model = lora.apply(build("DistilBertForSequenceClassification"), rank=2, task_type="SEQ_CLS")
    assert {
        "pre_classifier.modules_to_save.default.bias",
        "classifier.modules_to_save.default.bias",
    } < trained(model).keys()
    for options in (lora.IA3Options(task_type="SEQ_CLS"), lora.VeraOptions(task_type="SEQ_CLS")):
        assert "score.modules_to_save.default.weight" in trained(
            lora.apply(build("LlamaForSequenceClassification"), options)
        )
    with pytest.raises(ValueError, match="task_type: expected None, 'CAUSAL_LM', .* received 'CLS'"):
        lora.LoraOptions(task_type="CLS")
    with pytest.raises(ValueError, match="modules_to_save: expected names of modules, received 'head'"):
        lora.apply(
            build("LlamaForSequenceClassification"), rank=2, task_type="SEQ_CLS", modules_to_save=["head"]
        )
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    with pytest.raises(ValueError, match="task_type: expected a causal language model with virtual tokens"):
        lora.apply(build("LlamaForSequenceClassification"), prompt)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="modules_to_save: expected null or false, .* received"):
        lora.apply(llama(), prompt)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(
            target_modules=["q_proj"], bias="all", modules_to_save=["lm_head"], inference_mode=True
        ),
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], inference_mode=True),
        peft.VeraConfig(target_modules=["q_proj"], inference_mode=True),
    ],
    ids=["lora", "ia3", "vera"],
)
def test_inference_mode_trains_nothing_until_set_adapter(config: Any) -> None:
    ours, theirs = lora.apply(llama(), config), peft.get_peft_model(llama(), config)
    assert not trained(ours) and not trained(theirs)
    lora.set_adapter(ours, "default")
    theirs.set_adapter("default")
    assert len(trained(ours)) == len(trained(theirs)) > 0


def test_virtual_tokens_know_the_sizes_that_peft_fills_in() -> None:
    for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig):
        # Virtual tokens train in inference_mode, in PEFT too.
        config = kind(num_virtual_tokens=3, task_type="CAUSAL_LM", inference_mode=True)
        theirs = peft.get_peft_model(llama(), config)
        assert len(trained(theirs)) == 1 and config.token_dim is not None
        assert len(trained(lora.apply(llama(), config))) == 1
        config.token_dim += 1
        with pytest.raises(ValueError, match="token_dim: expected .* since nothing else is supported"):
            lora.apply(llama(), config)


def test_default_modules_of_an_architecture() -> None:
    """Without target_modules, the same modules get an adapter as in PEFT."""
    for config in (
        peft.IA3Config(),
        peft.IA3Config(target_modules=["k_proj", "down_proj"]),
        peft.IA3Config(target_modules="all-linear"),
        peft.VeraConfig(),
        peft.LoraConfig(target_modules="ALL-LINEAR"),
    ):
        ours = lora.apply(llama(), copy.deepcopy(config))
        theirs = peft.get_peft_model(llama(), copy.deepcopy(config))
        shapes = [sorted((n, tuple(p.shape)) for n, p in trained(m).items()) for m in (ours, theirs)]
        assert shapes[0] == shapes[1]
    # PEFT adapts the default modules in addition to the parameters that are named.
    config = peft.LoraConfig(target_parameters=["lm_head.weight"])
    ours, theirs = lora.apply(llama(), copy.deepcopy(config)), peft.get_peft_model(llama(), config).eval()
    assert len(trained(ours)) == len(trained(theirs)) == 10
    assert torch.equal(logits(ours), logits(theirs))
    with pytest.raises(ValueError, match="target_modules: .* no defaults for the architecture None"):
        lora.apply(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig())
    with pytest.raises(ValueError, match="feedforward_modules: .* no defaults for the architecture None"):
        lora.apply(nn.Sequential(nn.Linear(2, 2)), peft.IA3Config(target_modules=["0"]))

"""Test the files that ``save_pretrained`` and the Trainer of transformers write for a model that this library has changed.

With adapters they are an adapter folder, as for a model of PEFT. Quantised weights are refused.
"""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shoestring
from lora_models import llama, logits
from shoestring import lora
from shoestring.core import save_pretrained
from shoestring.nn import QuantizedLinear

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2},
    "dora": {"rank": 2, "dora": True},
    "trained_head": {"rank": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"rank": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "biases": {"rank": 2, "bias": "all"},
    "pissa": {"rank": 2, "init": "pissa"},
    "ia3": {"config": lora.IA3Options()},
    "vera": {"config": lora.VeraOptions(rank=4)},
    "prompt": {"config": lora.PromptOptions(tokens=3)},
    "prefix": {"config": lora.PrefixOptions(tokens=3)},
}


def changed(model: nn.Module) -> nn.Module:
    """Change what is trained, as a few steps would."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@functools.cache
def large() -> nn.Module:
    """Return a Llama whose weights are large enough to leave the device."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reloads_an_adapter(kind: str, tmp_path: Path) -> None:
    base = llama(biased=kind == "biases")
    model = changed(lora.apply(copy.deepcopy(base), **KINDS[kind]))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert names(tmp_path) == ADAPTER
    assert torch.allclose(logits(lora.load_adapter(copy.deepcopy(base), tmp_path)), expected, atol=1e-5)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert torch.allclose(logits(theirs), expected, atol=1e-5)


def test_transformers_reloads_an_adapter_with_its_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    assert "model.safetensors" in names(tmp_path / "base")
    model = changed(lora.apply(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), rank=2))
    model.save_pretrained(tmp_path / "adapter")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def test_several_adapters_have_a_folder_each(tmp_path: Path) -> None:
    model = changed(lora.apply(llama(), rank=2))
    model = changed(lora.apply(model, rank=4, adapter_name="other"))
    model.save_pretrained(tmp_path)
    assert names(tmp_path) == ADAPTER | {"other"} and names(tmp_path / "other") == ADAPTER
    theirs = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "other")).eval()
    assert torch.allclose(logits(theirs), logits(model), atol=1e-5)


@pytest.mark.parametrize("how", ["patched", "away", "copied", "pickled", "inside"])
def test_other_changes_of_the_model(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = base = copy.deepcopy(large()) if how == "away" else llama()
    again = copy.deepcopy(base)
    model = base.model if how == "inside" else base
    changed(lora.apply(model, rank=2, target_modules=["q_proj", "down_proj"]))
    expected = logits(whole)
    if how == "patched":
        shoestring.patch(whole)
    if how == "away":
        shoestring.offload_weights(whole, f"nvme:{tmp_path}")
    if how in ("copied", "pickled"):
        # Restore what a process has that has not changed a model yet.
        original = transformers.PreTrainedModel.save_pretrained.__wrapped__
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", original)
        whole = copy.deepcopy(whole) if how == "copied" else pickle.loads(pickle.dumps(whole))
    whole.save_pretrained(tmp_path / "adapter")
    assert names(tmp_path / "adapter") == ADAPTER
    theirs = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(theirs), expected, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_split_weights(adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are split among processes are refused, and written whole if the caller has gathered them."""
    original = transformers.PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        transformers.PreTrainedModel, "save_pretrained", getattr(original, "__wrapped__", original)
    )
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = lora.apply(llama(), rank=2) if adapted else llama()
        expected = logits(model)
        shoestring.parallelize(model, "zero3")
        with pytest.raises(ValueError, match="save_pretrained: model: expected whole weights, received .*lora_A"
                           if adapted else "save_pretrained: model: expected whole weights, received model.emb"):  # fmt: skip
            model.save_pretrained(tmp_path / "model")
        assert not (tmp_path / "model").exists()
        if not adapted:
            whole = StateDictOptions(full_state_dict=True)
            model.save_pretrained(tmp_path / "model", state_dict=get_model_state_dict(model, options=whole))
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            assert torch.allclose(logits(again), expected, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_a_merged_model(quantize: str | None, requantize: bool, tmp_path: Path) -> None:
    """A model that is dense after the merge is written as a whole; a quantised one is refused."""
    model = changed(lora.apply(llama(), rank=2, quantize=quantize))
    lora.merge(model, requantize=requantize)
    if quantize and requantize:
        with pytest.raises(
            ValueError, match="received model.layers.0.self_attn.q_proj, a QuantizedLinear"
        ) as info:
            model.save_pretrained(tmp_path / "model")
        assert "Call shoestring.save_quantized" in str(info.value) and not (tmp_path / "model").exists()
        shoestring.save_quantized(model, tmp_path / "model")
        again = shoestring.load_quantized(tmp_path / "model", dtype=torch.float32)
    else:
        model.save_pretrained(tmp_path / "model")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def test_a_merged_model_beside_its_adapter(tmp_path: Path) -> None:
    """from_pretrained would add the adapter to the merged model."""
    model = changed(lora.apply(llama(), rank=2))
    model.save_pretrained(tmp_path)
    lora.merge(model)
    with pytest.raises(ValueError, match="save_directory: expected a folder without an adapter, received"):
        model.save_pretrained(tmp_path)
    assert names(tmp_path) == ADAPTER
    for name in ADAPTER:
        (tmp_path / name).unlink()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


@pytest.mark.parametrize("how", ["load_quantized", "from_linear", "pickled"])
def test_quantised_weights_are_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    if how == "load_quantized":
        model.save_pretrained(tmp_path / "dense")
        model = shoestring.load_quantized(tmp_path / "dense", quant_type="int8", dtype=torch.float32)
    else:
        mlp = model.model.layers[1].mlp
        mlp.up_proj = QuantizedLinear.from_linear(mlp.up_proj, "int8")
    if how == "pickled":
        original = transformers.PreTrainedModel.save_pretrained.__wrapped__
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", original)
        model = pickle.loads(pickle.dumps(model))
    with pytest.raises(
        ValueError, match="save_pretrained: model: expected dense weights, received model.layers"
    ):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"push_to_hub": True},
        {"variant": "fp16"},
        {"save_peft_format": False},
        {"selected_adapters": ["default"]},
        {"state_dict": {"lm_head.weight": torch.zeros(2)}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_an_adapter_cannot_keep(arguments: dict[str, Any], tmp_path: Path) -> None:
    model = lora.apply(llama(), rank=2)
    with pytest.raises(ValueError, match=f"save_pretrained: {next(iter(arguments))}: expected "):
        model.save_pretrained(tmp_path / "adapter", **arguments)
    assert not (tmp_path / "adapter").exists()
    model.save_pretrained(tmp_path / "adapter", is_main_process=False, state_dict=model.state_dict())
    assert not (tmp_path / "adapter").exists()


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(97, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trained(model: nn.Module, folder: Path, resume: Path | None = None) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, seed=5, report_to=[],
        learning_rate=1e-2, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@pytest.mark.parametrize(
    "kind", ["lora", pytest.param("pissa", marks=pytest.mark.slow), "trained_head", "prompt"]
)
def test_a_trainer_resumes_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind] | ({"quantize": "nf4"} if kind in ("lora", "pissa") else {})
    whole = lora.apply(llama(), **options)
    trainer = trained(whole, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert ADAPTER | {"model.safetensors"} < names(checkpoint)
    if kind == "lora":
        base = sum(t.nbytes for t in llama().state_dict().values())
        assert (checkpoint / "model.safetensors").stat().st_size < base / 4  # no frozen weights
    torch.manual_seed(99)  # the resumed run replaces these weights
    resumed = lora.apply(llama(), **options)
    trained(resumed, tmp_path / "resumed", checkpoint)
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        if p.requires_grad:
            assert torch.equal(p, q), name
    trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "model.safetensors").exists()
    if "quantize" not in options:
        theirs = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "final")).eval()
        assert torch.allclose(logits(theirs), logits(whole.eval()), atol=1e-5)


def test_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of huggingface_hub are written in the same way, and so are those of diffusers."""
    from huggingface_hub import PyTorchModelHubMixin

    class Hub(nn.Module, PyTorchModelHubMixin):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

    class ModelMixin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def save_pretrained(
            self, save_directory: str, safe_serialization: bool = True, **kwargs: Any
        ) -> None:
            raise AssertionError("the class writes the model")

    module = types.ModuleType("diffusers.models.modeling_utils")
    module.ModelMixin = ModelMixin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind in (Hub, ModelMixin):
        model = changed(lora.apply(kind(), rank=2, target_modules=["layer"]))
        model.save_pretrained(str(tmp_path / kind.__name__))
        assert names(tmp_path / kind.__name__) == ADAPTER
    with pytest.raises(ValueError, match="safe_serialization: expected True"):
        model.save_pretrained(str(tmp_path), safe_serialization=False)
    assert save_pretrained.CLASSES[module.__name__] == "ModelMixin"
    Hub().save_pretrained(tmp_path / "plain")
    assert "model.safetensors" in names(tmp_path / "plain")

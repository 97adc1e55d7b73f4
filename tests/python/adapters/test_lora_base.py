"""Adapters and their base: which base a file needs, and which of its weights a file replaces."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_models import llama, logits, randomise
from shoestring import lora


def _peft(folder: Path, base: Any = None, convert: bool = False, **options: Any) -> tuple[Path, torch.Tensor]:
    """Save a changed adapter of PEFT; return its folder, and the logits of PEFT's own reload."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    model = peft.get_peft_model(llama() if base is None else copy.deepcopy(base), config)
    more = {}
    if convert:
        model.save_pretrained(str(folder / "first"))
        more = {"path_initial_model_for_weight_conversion": str(folder / "first")}
    randomise(model)
    model.save_pretrained(str(folder / "adapter"), **more)
    again = llama() if base is None else copy.deepcopy(base)
    return folder / "adapter", logits(peft.PeftModel.from_pretrained(again, str(folder / "adapter")).eval())


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian", "orthogonal"])
def test_peft_initialisations_load_as_in_peft(init: str, convert: bool, tmp_path: Path) -> None:
    if convert and init not in ("pissa", "olora"):
        pytest.skip("PEFT converts only initialisations that changed the base")
    folder, expected = _peft(tmp_path, convert=convert, init_lora_weights=init)
    base = llama()
    plain = logits(base)
    model = lora.load_adapter(base, folder)
    assert (logits(model) - expected).abs().max() <= 2e-5
    with lora.disable_adapter(model):
        assert (logits(model) - plain).abs().max() <= 2e-5
    lora.save_adapter(model, tmp_path / "ours")
    assert (logits(lora.load_adapter(llama(), tmp_path / "ours")) - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("init", ["pissa_niter_4", "loftq", "corda", "lora_ga", "new", 3])
def test_a_base_that_cannot_be_computed_again_is_refused(init: Any, tmp_path: Path) -> None:
    lora.save_adapter(lora.apply(llama(), rank=2), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"init_lora_weights": init}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"init_lora_weights: expected .* received .*path_initial_model"):
        lora.load_adapter(llama(), tmp_path)


def test_pissa_needs_a_dense_base(tmp_path: Path) -> None:
    folder, _ = _peft(tmp_path, init_lora_weights="pissa")
    base = lora.apply(llama(), target_modules=["v_proj"], adapter_name="other", quantize="nf4")
    with pytest.raises(ValueError, match="expected a dense weight for init_lora_weights 'pissa'"):
        lora.load_adapter(base, folder)
    assert lora.adapter_names(base) == ["other"]


@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabulary(tied: bool, tmp_path: Path) -> None:
    llama(tied).save_pretrained(tmp_path / "base")
    transformers = pytest.importorskip("transformers")

    def resized() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(104, mean_resizing=False)
        return model.eval()

    base = resized()
    with torch.no_grad():
        base.get_input_embeddings().weight[97:] = 0.3
    folder, expected = _peft(tmp_path, base)
    assert torch.equal(logits(lora.load_adapter(resized(), folder)), expected) or torch.allclose(
        logits(lora.load_adapter(resized(), folder)), expected, atol=1e-6
    )
    ours = randomise(lora.apply(base, rank=2, target_modules=["q_proj"]))
    lora.save_adapter(ours, tmp_path / "ours")
    assert torch.allclose(logits(lora.load_adapter(resized(), tmp_path / "ours")), logits(ours), atol=1e-6)
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(resized(), str(tmp_path / "ours")).eval()
    assert torch.allclose(logits(theirs), logits(ours), atol=1e-6)
    for name in ("ours", "adapter"):
        with pytest.raises(ValueError, match=r"call model.resize_token_embeddings\(104\) first"):
            lora.load_adapter(llama(tied), tmp_path / name)


def test_another_base_is_refused(tmp_path: Path) -> None:
    lora.save_adapter(lora.apply(llama(), rank=2), tmp_path)
    lora.load_adapter(llama().bfloat16(), tmp_path)
    lora.load_adapter(lora.apply(llama(), adapter_name="other", quantize="nf4"), tmp_path)
    other = llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 1.05
    with pytest.raises(
        ValueError, match=r"expected the base model .* other values in 'model.layers.1.self_attn.k_proj"
    ):
        lora.load_adapter(other, tmp_path)
    assert not lora.adapter_names(other)
    lora.load_adapter(other, tmp_path, any_base=True)
    other = llama()
    other.config.model_type = "qwen3"
    with pytest.raises(ValueError, match="the architecture 'qwen3' instead of 'llama'"):
        lora.load_adapter(other, tmp_path)
    other = llama()
    other.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="other names or shapes of weights"):
        lora.load_adapter(other, tmp_path)


def test_what_a_file_of_peft_says_of_its_base(tmp_path: Path) -> None:
    folder, _ = _peft(tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if ".layers.1." not in k}, file)
    with pytest.raises(
        ValueError, match=r"layers.1.* one of target_modules, for which the file has no values"
    ):
        lora.load_adapter(llama(), folder)
    lora.load_adapter(llama(), folder, any_base=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["auto_mapping"] = {"base_model_class": "Qwen3ForCausalLM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the class LlamaForCausalLM instead of 'Qwen3ForCausalLM'"):
        lora.load_adapter(llama(), folder)


def test_pissa_beside_trained_tokens() -> None:
    base = llama()
    plain = logits(base)
    model = lora.apply(base, rank=2, init="pissa", target_modules=["q_proj"], trainable_token_indices=[1, 2])
    assert (logits(model) - plain).abs().max() <= 2e-5


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "/tmp/x", "a\\b", "a\0b", "a\nb", "\udc80", "x" * 300, ""]
)
def test_names_that_are_no_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("adapter_name: expected a name")):
        lora.apply(llama(), rank=2, adapter_name=name)
    with pytest.raises(ValueError, match=re.escape("adapter_name: expected a name")):
        lora.load_adapter(llama(), tmp_path, name)


class Wrapper(nn.Module):
    """A model whose own names begin with the prefix that PEFT gives to all names."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = nn.Module()
        self.base_model.model.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model.model.q(x)


def test_a_model_whose_names_begin_with_the_prefix_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Wrapper()
    model = lora.apply(copy.deepcopy(base), rank=2, target_modules=["q"], bias="lora_only", init="random")
    with torch.no_grad():
        model.base_model.model.q.bias += 1
    lora.save_adapter(model, tmp_path)
    x = torch.randn(3, 8)
    torch.testing.assert_close(lora.load_adapter(base, tmp_path)(x), model(x))


class Layers(nn.Module):
    """Layers of which some are named like the wrappers that PEFT's files name."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            parent: nn.Module = self
            *places, last = name.split(".")
            for place in places:
                if not hasattr(parent, place):
                    parent.add_module(place, nn.Module())
                parent = parent.get_submodule(place)
            parent.add_module(last, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize("first", ["x.base_layer.q", "x.base_layer", "x.token_adapter.base_layer.q"])
@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize("targets", ["all-linear", ["x.q"]], ids=["all", "one"])
def test_modules_named_like_a_wrapper_of_the_file(
    first: str, bias: str, targets: str | list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = Layers(first, "x.q")
    model = lora.apply(copy.deepcopy(base), rank=2, target_modules=targets, bias=bias, init="random")
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter += 0.1 * (i + 1)
    lora.save_adapter(model, tmp_path)
    x = torch.randn(3, 8)
    torch.testing.assert_close(lora.load_adapter(base, tmp_path)(x), model(x))


def test_an_adapter_is_not_named_as_an_attribute_of_modules() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="training"):
        lora.apply(model, adapter_name="training", target_modules=["0"], modules_to_save=["1"])
    assert not any("lora" in name for name, _ in model.named_parameters())

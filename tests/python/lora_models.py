"""Helpers for tests of adapters: a tiny Llama, random adapter values, and a comparison with PEFT."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoestring


@functools.cache
def _llama(tied: bool, dtype: torch.dtype, biased: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=biased, mlp_bias=biased,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def llama(tied: bool = False, dtype: torch.dtype = torch.float32, biased: bool = False) -> nn.Module:
    """Return a Llama of two layers with fixed random weights; ``biased`` adds biases to attention and MLP."""
    model = copy.deepcopy(_llama(tied, dtype, biased))
    # reset the random generator: building the model has advanced it, but returning a cached model has not
    torch.manual_seed(0)
    return model


def randomise(model: nn.Module, adapter: str = "default") -> nn.Module:
    """Change the parameters of an adapter randomly, because a new LoRA adapter changes no output."""
    kinds = ("lora_", "ia3_", "vera_lambda", "modules_to_save")
    for name, parameter in model.named_parameters():
        if adapter in name.split(".") and any(kind in name for kind in kinds):
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters of a PEFT or shoestring model, by their names in shoestring."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            name = name.replace("lora_B.default.bias", "lora_bias.default")
            found[name.removesuffix(".weight") if "lora_" in name else name] = parameter
    return found


def logits(model: nn.Module, seed: int = 3) -> Tensor:
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(ids).logits


def assert_files_agree(ours: nn.Module, folder: Path, base: object = llama) -> None:
    """Assert that shoestring and PEFT load each other's adapter files and give equal logits, to 1e-6."""
    peft = pytest.importorskip("peft")
    expected = logits(ours.eval())
    shoestring.lora.save_adapter(ours, folder / "ours")
    theirs = peft.PeftModel.from_pretrained(base(), str(folder / "ours")).eval()
    assert (logits(theirs) - expected).abs().max() <= 1e-6
    theirs.save_pretrained(str(folder / "theirs"))
    for adapter in ("ours", "theirs"):
        loaded = shoestring.lora.load_adapter(base(), folder / adapter).eval()
        assert (logits(loaded) - expected).abs().max() <= 1e-6

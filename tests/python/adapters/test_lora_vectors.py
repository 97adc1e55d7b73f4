"""Test IA3 and VeRA, which train vectors, and the parameter groups of LoRA+."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_models import assert_files_agree, llama, logits, randomise
from shoestring import lora
from shoestring.files.safetensors_file import open_safetensors
from shoestring.nn import QuantizedLinear

IA3 = lora.IA3Options(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
VERA = lora.VeraOptions(rank=8, target_modules=["q_proj", "v_proj", "down_proj"])


def biased() -> nn.Module:
    return llama(biased=True)


@pytest.mark.parametrize("options", [IA3, VERA], ids=["ia3", "vera"])
def test_starts_as_peft_and_files_agree(options: lora.IA3Options | lora.VeraOptions, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    if isinstance(options, lora.IA3Options):
        config = peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    else:
        config = peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    ours, theirs = lora.apply(biased(), config), peft.get_peft_model(biased(), config)
    assert (logits(ours) - logits(biased())).abs().max() <= 1e-6
    mine = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    peers = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert mine.keys() == peers.keys() and all(torch.equal(mine[n], peers[n]) for n in mine)
    for model in (ours, theirs, own := lora.apply(biased(), options)):
        torch.manual_seed(2)
        randomise(model)
        assert (logits(model.eval()) - logits(ours)).abs().max() <= 1e-6
    assert lora.adapter_names(own) == ["default"]
    assert (logits(ours) - logits(biased())).abs().max() > 1e-3
    assert_files_agree(ours, tmp_path, biased)


@pytest.mark.parametrize("options", [IA3, VERA], ids=["ia3", "vera"])
@pytest.mark.parametrize("quantize", [None, "nf4", "int4", "int8"])
def test_merges_copies_and_resumes(options: lora.IA3Options | lora.VeraOptions, quantize: str | None) -> None:
    model = randomise(lora.apply(biased(), options, quantize=quantize))
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    fresh = lora.apply(biased(), options, quantize=quantize)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), expected)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lora.merge(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    lora.delete_adapter(model, "default")
    assert type(model.model.layers[0].mlp.down_proj) is (QuantizedLinear if quantize else nn.Linear)


@pytest.mark.device
@pytest.mark.parametrize("feedforward", [False, True], ids=["output", "input"])
def test_ia3_gradients_and_several(feedforward: bool) -> None:
    options = lora.IA3Options(target_modules=["0"], feedforward_modules=["0"] if feedforward else [])
    model = lora.apply(nn.Sequential(nn.Linear(7, 5)).double(), options)
    lora.apply(model, options, adapter_name="b")
    randomise(randomise(model), "b")
    lora.set_adapter(model, ["default", "b"])
    own, x = model[0], torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    gain = (own.ia3_l["default"] * own.ia3_l["b"]).flatten()
    linear = nn.functional.linear
    exact = linear(x * gain, own.weight, own.bias) if feedforward else gain * linear(x, own.weight, own.bias)
    _compare(model, x, exact)


@pytest.mark.device
def test_vera_gradients_and_rows() -> None:
    options = lora.VeraOptions(rank=3, target_modules=["0", "1"])
    model = lora.apply(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9)).double(), options)
    randomise(model)
    assert all(isinstance(layer, lora.VeraLinear) for layer in model)
    assert model[0].vera["default"] is model[1].vera["default"]
    assert sum(b.numel() for b in model.buffers()) == 3 * (7 + 9)
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    exact = x
    for own in model:
        A = own.vera_lambda_d["default"][:, None] * own.vera["default"].vera_A[:, : own.in_features]
        B = own.vera_lambda_b["default"][:, None] * own.vera["default"].vera_B[: own.out_features]
        exact = nn.functional.linear(exact, own.weight + B @ A, own.bias)
    _compare(model, x, exact)
    with lora.adapters_per_row(model, ["default", None, "default", "default"]):
        mixed = model(x)
    with lora.disable_adapter(model):
        torch.testing.assert_close(mixed[1], model(x)[1])
    torch.testing.assert_close(mixed[2:], exact[2:])


def _compare(model: nn.Module, x: Tensor, exact: Tensor) -> None:
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    up, y = torch.randn_like(exact), model(x)
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(y, leaves, up), torch.autograd.grad(exact, leaves, up), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vera_without_its_projection_in_the_file(tmp_path: Path) -> None:
    from dataclasses import replace

    model = randomise(lora.apply(llama(), replace(VERA, save_projection=False, seed=5, bias="vera_only")))
    assert_files_agree(model, tmp_path)
    file = open_safetensors(tmp_path / "ours" / "adapter_model.safetensors", "a damaged file")
    assert not any("vera_A" in key for key in file.tensors())


def test_learning_rates_are_pefts() -> None:
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], bias="all", use_dora=True)
    ours, theirs = lora.apply(biased(), config), peft.get_peft_model(biased(), config)
    groups = lora.loraplus_param_groups(ours, 1e-3, lr_ratio=16, weight_decay=0.1)
    optimizer = create_loraplus_optimizer(
        theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1
    )

    def rates(groups: list[dict], model: nn.Module) -> dict[str, float]:
        by_id = {id(p): group["lr"] for group in groups for p in group["params"]}
        names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
        clean = (("base_model.model.", ""), (".base_layer", ""), (".weight", ""))
        found = {}
        for key, name in names.items():
            for old, new in clean:
                name = name.replace(old, new)
            found[name] = by_id[key]
        return found

    assert rates(groups, ours) == rates(optimizer.param_groups, theirs)
    assert all(g["weight_decay"] == 0 for g in groups if any(p.dim() == 1 for p in g["params"]))
    torch.optim.AdamW(groups)
    model = lora.apply(llama(), rank=2, target_modules=["embed_tokens", "q_proj"])
    groups = lora.loraplus_param_groups(model, 1e-3, lr_ratio=4, embedding_lr=1e-5)
    found = rates(groups, model)
    assert {rate for name, rate in found.items() if "embedding" in name} == {1e-5}
    assert {rate for name, rate in found.items() if "q_proj" in name} == {1e-3, 4e-3}
    with pytest.raises(ValueError, match="lr_ratio: expected at least 1, received 0.5"):
        lora.loraplus_param_groups(ours, 1e-3, lr_ratio=0.5)
    with pytest.raises(ValueError, match="expected parameters that require a gradient, received none"):
        lora.loraplus_param_groups(llama().requires_grad_(False), 1e-3)


def test_errors(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for config, message in [
        (
            peft.IA3Config(target_modules=["q_proj"], init_ia3_weights=False),
            "init_ia3_weights: expected True",
        ),
        (peft.VeraConfig(target_modules=["q_proj"], init_weights=False), "init_weights: expected True"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(llama(), config)
    with pytest.raises(ValueError, match="bias: expected 'none', received 'all'"):
        lora.IA3Options(bias="all")
    model = lora.apply(llama(), IA3)
    with pytest.raises(
        ValueError, match="config: expected adapters of the kind that model.* has, IA3Linear; rec.*Vera"
    ):
        lora.apply(model, VERA, adapter_name="b")
    with pytest.raises(ValueError, match="received 'default', which has a IA3Linear at model"):
        lora.adapters_per_row(model, ["default"]).__enter__()
    lora.save_adapter(lora.apply(llama(), VERA), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if k != "base_model.vera_A"}, weights)
    with pytest.raises(
        ValueError, match=r"expected base_model.vera_A \(8, 96\) and base_model.vera_B \(64, 8\)"
    ):
        lora.load_adapter(llama(), tmp_path)

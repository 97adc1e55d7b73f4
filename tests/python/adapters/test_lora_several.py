"""Test several adapters in a model: active adapters, sums, one per batch row, deletion, saved files."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring
from lora_models import llama, logits, randomise
from shoestring import lora
from shoestring.lora import LoraLinear


def two(**options: object) -> nn.Module:
    """Build a model with the adapters "default" and "b", which differ in rank, scaling and target modules."""
    model = lora.apply(llama(), rank=4, alpha=12, target_modules=["q_proj", "v_proj", "up_proj"], **options)
    lora.apply(
        model,
        rank=2,
        alpha=2,
        target_modules=["v_proj", "down_proj", "lm_head"],
        adapter_name="b",
        rslora=True,
    )
    torch.manual_seed(1)
    return randomise(randomise(model), "b")


def trained(model: nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name, p in model.named_parameters() if p.requires_grad}


def test_switched_and_added_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = two()
    lora.save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["use_rslora"]
    theirs = peft.PeftModel.from_pretrained(llama(), str(tmp_path)).eval()
    theirs.load_adapter(str(tmp_path / "b"), "b")
    # Only the adapter that was added last is active and trainable.
    assert trained(model) == {"b"} and lora.adapter_names(model) == ["default", "b"]
    base = logits(llama())
    for names in ("default", "b", ["default", "b"], ["b", "default"]):
        lora.set_adapter(model, names)
        theirs.base_model.set_adapter(names)
        assert (logits(model) - logits(theirs)).abs().max() <= 1e-6
        assert trained(model) == ({names} if isinstance(names, str) else {*names})
    assert (logits(model) - base).abs().max() > 1e-2
    with lora.disable_adapter(model):
        assert (logits(model) - base).abs().max() <= 1e-6
    assert (logits(model) - logits(theirs)).abs().max() <= 1e-6

    # Load the adapters that PEFT saved, and load one of shoestring's adapters under another name.
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = lora.load_adapter(lora.load_adapter(llama(), tmp_path / "theirs"), tmp_path / "theirs", "b")
    lora.set_adapter(again, ["b", "default"])
    assert (logits(again) - logits(theirs)).abs().max() <= 1e-6
    lora.load_adapter(again, tmp_path / "b", "c")
    assert trained(again) == {"c"}
    lora.set_adapter(model, "b")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.device
def test_gradients_of_several_are_those_of_plain_autograd() -> None:
    model = lora.apply(
        nn.Sequential(nn.Linear(7, 5)).double(), rank=3, alpha=5, target_modules=["0"], lora_bias=True
    )
    lora.apply(model, rank=2, alpha=1, target_modules=["0"], adapter_name="b")
    randomise(randomise(model), "b")
    lora.set_adapter(model, ["default", "b"])
    layer, x = model[0], torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    weight, bias = layer.weight, layer.bias
    for name in ("default", "b"):
        options = layer.adapters[name]
        weight = weight + options.scaling * layer.lora_B[name] @ layer.lora_A[name]
        bias = bias + (options.scaling * layer.lora_bias[name] if options.lora_bias else 0)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    assert len(leaves) == 6
    exact = nn.functional.linear(x, weight, bias)
    up = torch.randn_like(exact)
    for a, b in zip(
        torch.autograd.grad(model(x), leaves, up), torch.autograd.grad(exact, leaves, up), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["lora", "lora_bias"])
def test_a_different_adapter_for_each_row(kind: str) -> None:
    options = {"lora": {}, "lora_bias": {"lora_bias": True}}[kind]
    model = two(**options)
    ids = torch.randint(97, (4, 6))
    rows = ["b", None, "default", "b"]
    with lora.adapters_per_row(model, rows):
        mixed = model(ids).logits
        with pytest.raises(
            ValueError,
            match="expected one name for each of the 3 rows of the batch that reached a layer, rec",
        ):
            model(ids[:3])
    gradients = torch.autograd.grad(
        mixed[0].sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    # row 0 of the batch uses "b", the only trainable adapter
    assert all(g is not None for g in gradients)
    for row, name in enumerate(rows):
        if name is None:
            with lora.disable_adapter(model):
                alone = model(ids[row : row + 1]).logits
        else:
            lora.set_adapter(model, name)
            alone = model(ids[row : row + 1]).logits
        torch.testing.assert_close(mixed[row : row + 1], alone, rtol=1e-5, atol=1e-6)


def test_deleted_and_renamed_adapters_leave_the_others() -> None:
    model = two()
    lora.set_adapter(model, ["default", "b"])
    expected = two()
    lora.set_adapter(expected, "b")
    lora.delete_adapter(model, "default")
    assert torch.equal(logits(model), logits(expected)) and trained(model) == {"b"}
    # up_proj had no other adapter, so it is a plain linear layer again.
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    lora.delete_adapter(model, "b")
    assert torch.equal(logits(model), logits(llama())) and not any(
        isinstance(m, LoraLinear) for m in model.modules()
    )
    assert model.state_dict().keys() == llama().state_dict().keys()


def test_merges_some_and_takes_back_all() -> None:
    model = two()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lora.set_adapter(model, ["default", "b"])
    expected = logits(model)
    lora.merge(model, ["default", "b"])
    assert not any("lora" in key for key in model.state_dict())
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), expected) and trained(model) == {"default", "b"}
    lora.set_adapter(model, "b")
    expected = logits(model)
    lora.set_adapter(model, "default")
    lora.merge(model, ["b"])
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_copies_and_state_dicts() -> None:
    model = two()
    lora.set_adapter(model, ["default", "b"])
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    fresh = two()
    nn.init.zeros_(fresh.lm_head.lora_B["b"])
    fresh.load_state_dict(model.state_dict())
    lora.set_adapter(fresh, ["default", "b"])
    assert torch.equal(logits(fresh), logits(model))
    nn.init.zeros_(twin.lm_head.lora_B["b"])
    assert torch.equal(logits(fresh), logits(model)) and not torch.equal(logits(twin), logits(model))


def test_several_compile_whole() -> None:
    # Drop graphs of other tests, which count towards torch.compile's limit of recompilations.
    torch.compiler.reset()
    model = lora.apply(nn.Sequential(nn.Linear(16, 8)), rank=4, target_modules=["0"], quantize=None)
    lora.apply(model, rank=2, target_modules=["0"], adapter_name="b")
    randomise(randomise(model), "b")
    lora.set_adapter(model, ["default", "b"])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(compiled(x), model(x))
    with lora.adapters_per_row(model, ["b", None, "default"]):
        torch.testing.assert_close(compiled(x), model(x))
    lora.set_adapter(model, "b")
    torch.testing.assert_close(compiled(x), model(x))


def test_errors(tmp_path: Path) -> None:
    model = two()
    for call, message in [
        (
            lambda: lora.set_adapter(model, "c"),
            "lora.set_adapter: adapter_names: .* default, b; received 'c'",
        ),
        (lambda: lora.delete_adapter(model, "c"), "lora.delete_adapter: adapter_names: .* received 'c'"),
        (lambda: lora.merge(model, ["c"]), "lora.merge: adapter_names: .* received 'c'"),
        (
            lambda: lora.save_adapter(model, tmp_path / "no", ["c"]),
            "lora.save_adapter: adapter_names: .* received 'c'",
        ),
        (
            lambda: lora.adapters_per_row(model, ["c", None]).__enter__(),
            "lora.adapters_per_row: .* received 'c'",
        ),
        (
            lambda: lora.set_adapter(llama(), "default"),
            "expected names of this model's adapters, none; received 'default'",
        ),
        (
            lambda: lora.apply(model, adapter_name="a.b"),
            "adapter_name: expected a name without dots.* received 'a.b'",
        ),
        (lambda: lora.apply(model, adapter_name="keys"), "no method of nn.ParameterDict, received 'keys'"),
        (lambda: lora.apply(model, adapter_name="b"), "but the model has an adapter 'b'"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "no").exists()
    mixed = lora.apply(nn.Sequential(nn.Linear(4, 4)), rank=2, target_modules=["0"], dropout=0.5)
    lora.apply(mixed, rank=2, target_modules=["0"], adapter_name="b")
    lora.set_adapter(mixed, ["default", "b"])
    with pytest.raises(
        ValueError,
        match=r"dropout: expected the same dropout for all active adapters in training, rec.*0.0, 0.5",
    ):
        mixed.train()(torch.ones(1, 4))
    assert shoestring.lora.adapter_names(mixed) == ["default", "b"]

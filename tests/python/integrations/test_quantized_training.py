"""prepare_quantized and convert_quantized: a model is trained with the weights that it is stored with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.nn import FakeQuantizedLinear, QuantizedLinear
from tiny_decoder import build_decoder

FORMS: tuple[dict[str, Any], ...] = (
    {"quant_type": "nf4"},
    {"quant_type": "nf4", "double_quant": True, "block_size": 32},
    {"quant_type": "fp4"},
    {"quant_type": "int4"},
    {"quant_type": "int8"},
)
TOKENS = torch.arange(1, 41).view(2, 20)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def fake_layers(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if type(m) is FakeQuantizedLinear]


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train a model on BATCH, and assert that the loss falls."""
    losses = []
    for _ in range(steps):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def trained(form: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny Llama after three steps of quantisation-aware training."""
    model = shoestring.prepare_quantized(build_decoder().to(dtype), **form)
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=5e-3, state_format="8bit")
    train(model, optimizer, 3)
    return model.eval()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_converted_model_is_the_trained_one(form: dict[str, Any], tmp_path: Path) -> None:
    """The converted model, also from a file, has the trained weights bit for bit, and equal logits up to rounding."""
    model = trained(form)
    names, keys = fake_layers(model), list(model.state_dict())
    assert len(names) == 14 and keys == list(build_decoder().state_dict())
    layer_form = tuple(
        form.get(key, default)
        for key, default in (("quant_type", "nf4"), ("block_size", None), ("double_quant", False))
    )
    weights = {
        n: shoestring.fake_quantize(model.get_submodule(n).weight.detach(), *layer_form) for n in names
    }
    with torch.no_grad():
        expected = model(TOKENS).logits
    biases = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert shoestring.convert_quantized(model) is model

    def check(model: Any) -> None:
        for name, weight in weights.items():
            layer = model.get_submodule(name)
            assert type(layer) is QuantizedLinear and not layer.weight.requires_grad
            assert torch.equal(layer.weight.dequantize(), weight), name
        assert type(model.lm_head) is nn.Linear
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)

    check(model)
    assert all(p is biases[name] for name, p in model.named_parameters() if name in biases)
    if form["quant_type"] == "int4":
        with pytest.raises(ValueError, match="save_quantized: model: expected nf4, fp4 or int8 layers"):
            shoestring.save_quantized(model, tmp_path / "int4")
        again = shoestring.convert_quantized(shoestring.prepare_quantized(build_decoder(), **form))
        again.load_state_dict(model.state_dict())
        check(again.eval())
    else:
        shoestring.save_quantized(model, tmp_path / "saved")
        check(shoestring.load_quantized(tmp_path / "saved", dtype=torch.float32))
    adapted = shoestring.lora.apply(model, rank=2)
    adapted(**BATCH).loss.backward()


def test_bf16_weights_with_stochastic_rounding() -> None:
    model = shoestring.prepare_quantized(build_decoder().bfloat16(), "int4")
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=5e-3, weight_rounding="stochastic")
    train(model, optimizer, 4)
    weight = shoestring.fake_quantize(model.model.layers[0].mlp.up_proj.weight.detach(), "int4")
    converted = shoestring.convert_quantized(model).model.layers[0].mlp.up_proj.weight
    assert converted.dtype == torch.bfloat16 and torch.equal(converted.dequantize(), weight)


def test_a_patched_model_trains_alike() -> None:
    for order in ("patch", "prepare"):
        model = build_decoder()
        plain = shoestring.prepare_quantized(copy.deepcopy(model), "int8")
        if order == "patch":
            shoestring.patch(model)
            shoestring.prepare_quantized(model, "int8")
        else:
            shoestring.patch(shoestring.prepare_quantized(model, "int8"))
        assert len(fake_layers(model)) == 14
        ours, theirs = ({"": m(**BATCH).loss} for m in (model, plain))
        torch.testing.assert_close(ours[""], theirs[""], rtol=1e-5, atol=0)
        for m in (ours, theirs):
            m[""].backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_which_layers() -> None:
    model = shoestring.prepare_quantized(build_decoder(), skip_modules=["0.mlp.up_proj", "q_proj"])
    names = fake_layers(model)
    assert len(names) == 11 and "model.layers.1.mlp.up_proj" in names and "lm_head" not in names
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    model = shoestring.prepare_quantized(build_decoder(), target_modules=["down_proj", "lm_head"])
    assert fake_layers(model) == [*(f"model.layers.{i}.mlp.down_proj" for i in range(2)), "lm_head"]
    model = shoestring.prepare_quantized(
        build_decoder(), target_modules=r".*layers\.1\..*_proj", skip_modules=["o_proj"]
    )
    assert len(fake_layers(model)) == 6
    shoestring.prepare_quantized(model, "int8")  # the layers that are still nn.Linear
    assert len(fake_layers(model)) == 14 and model.model.layers[1].mlp.up_proj.quant_type == "nf4"


def test_errors_leave_the_model_unchanged(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    for options, message in (
        ({"quant_type": "nf5"}, "quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received 'nf5'"),
        ({"block_size": 48}, "block_size: expected one of"),
        ({"quant_type": "int8", "block_size": 64}, "block_size and double_quant: expected None and False"),
        (
            {"target_modules": ["3"]},
            "target_modules: expected names of modules, received '3', which matches nothing",
        ),
        ({"skip_modules": ["head"]}, "skip_modules: expected names of modules, received 'head'"),
        (
            {"target_modules": ["0", "1"]},
            "target_modules: expected nn.Linear layers, received 1, a LayerNorm",
        ),
        ({"skip_modules": ["0", "2"]}, "model: expected nn.Linear layers to prepare, received none"),
    ):
        with pytest.raises(ValueError, match=f"^prepare_quantized: {message}"):
            shoestring.prepare_quantized(model, **options)
    model[2].double()
    with pytest.raises(
        ValueError, match="prepare_quantized: model: expected fp32, bf16 or fp16 weights, received .*64 in 2"
    ):
        shoestring.prepare_quantized(model)
    assert not fake_layers(model)
    with pytest.raises(ValueError, match="convert_quantized: model: expected FakeQuantizedLinear layers"):
        shoestring.convert_quantized(model)
    decoder = shoestring.prepare_quantized(build_decoder())
    with pytest.raises(
        ValueError, match="received .*q_proj, a FakeQuantizedLinear; call convert_quantized first"
    ):
        shoestring.save_quantized(decoder, tmp_path / "new")
    with pytest.raises(ValueError, match="received .*q_proj, a FakeQuantizedLinear"):
        shoestring.lora.apply(decoder, target_modules=["q_proj"])

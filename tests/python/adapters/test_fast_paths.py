"""Adapters and quantised weights in nn.TransformerEncoder, which has a fast path that calls no layer."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoestring
from lora_models import randomise
from shoestring import lora

PADDING = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def outputs(model: nn.Module) -> list[Tensor]:
    """Return the outputs without and with padding, at the positions that are not padded."""
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    return [model(x), model(x, src_key_padding_mask=PADDING)[~PADDING]]


def has_fast_path(model: nn.Module) -> bool:
    """Return whether evaluation computes an encoder layer from its weights alone."""
    with torch.profiler.profile() as profile, torch.no_grad():
        outputs(model.eval())
    return any(event.key == "aten::_transformer_encoder_layer_fwd" for event in profile.key_averages())


def loaded(model: nn.Module, folder: Path) -> nn.Module:
    source = lora.apply(copy.deepcopy(model), rank=4)
    lora.save_adapter(randomise(source), folder)
    return lora.load_adapter(model, folder)


def by_hand(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.linear1 = shoestring.nn.QuantizedLinear.from_linear(layer.linear1)
    return model


PARTS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "apply": lambda model, _: randomise(lora.apply(model, rank=4)),
    "one layer": lambda model, _: randomise(lora.apply(model, rank=4, target_modules=["layers.1.linear2"])),
    "load_adapter": loaded,
    "quantize": lambda model, _: randomise(lora.apply(model, rank=4, quantize="nf4")),
    "by hand": lambda model, _: by_hand(model),
    "prepare_quantized": lambda model, _: shoestring.prepare_quantized(model, "int4"),
    "convert_quantized": lambda model, _: shoestring.convert_quantized(
        shoestring.prepare_quantized(model, "int4")
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_evaluation_computes_what_training_does(part: str, tmp_path: Path) -> None:
    model = PARTS[part](encoder(), tmp_path)
    expected = [y.detach() for y in outputs(model.train())]
    with torch.no_grad():
        torch.testing.assert_close(outputs(model.eval()), expected)


def test_without_adapters_the_fast_path_is_back() -> None:
    model = encoder()
    assert has_fast_path(model)
    lora.apply(model, rank=4)
    assert not has_fast_path(copy.deepcopy(model))
    lora.merge(model)
    assert has_fast_path(model)
    lora.unmerge(model)
    assert not has_fast_path(model)
    lora.delete_adapter(model, "default")
    assert has_fast_path(model)
    assert model.use_nested_tensor and all(layer.activation_relu_or_gelu == 1 for layer in model.layers)


def test_a_fast_path_that_was_off_stays_off() -> None:
    model = encoder()
    model.use_nested_tensor = False
    lora.delete_adapter(lora.apply(model, rank=4), "default")
    assert not model.use_nested_tensor

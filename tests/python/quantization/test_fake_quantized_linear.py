"""FakeQuantizedLinear: an nn.Linear that computes with the values of its quantised weight."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shoestring
from processes import run, train_halves
from references.quantization import fake_quantize_reference
from shoestring.nn import FakeQuantizedLinear, QuantizedLinear

FORMS: tuple[dict[str, Any], ...] = (
    {"quant_type": "nf4"},
    {"quant_type": "nf4", "double_quant": True},
    {"quant_type": "fp4", "block_size": 128},
    {"quant_type": "int4", "block_size": 32},
    {"quant_type": "int8"},
)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_step_is_that_of_the_eager_reference(form: dict[str, Any]) -> None:
    """Outputs, gradients and weights after steps equal, bit for bit, those of F.linear with the reference."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = FakeQuantizedLinear(96, 10, dtype=dtype, **form)
        twin = nn.Linear(96, 10, dtype=dtype)
        twin.load_state_dict(layer.state_dict())
        optimizers = [shoestring.optim.AdamW(m.parameters(), lr=1e-2) for m in (layer, twin)]
        for _ in range(3):
            x = torch.randn(7, 96, dtype=dtype)
            outputs = layer(x), F.linear(x, fake_quantize_reference(twin.weight, **form), twin.bias)
            assert torch.equal(*outputs)
            for y, optimizer in zip(outputs, optimizers, strict=True):
                y.square().sum().backward()
                optimizer.step()
            assert torch.equal(layer.weight.grad, twin.weight.grad)
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert torch.equal(layer.weight, twin.weight) and torch.equal(layer.bias, twin.bias)


def test_is_an_nn_linear() -> None:
    """Initial values and state dict are those of nn.Linear; copies and pickles keep the form."""
    torch.manual_seed(3)
    layer = FakeQuantizedLinear(64, 10, quant_type="int4", block_size=32)
    torch.manual_seed(3)
    linear = nn.Linear(64, 10)
    assert list(layer.state_dict()) == list(linear.state_dict())
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)
    assert "int4, block_size=32, double_quant=False" in repr(layer)
    assert "int8, block_size=64" in repr(FakeQuantizedLinear(64, 10, quant_type="int8"))
    assert FakeQuantizedLinear(64, 10, bias=False).bias is None
    x = torch.randn(3, 64)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert twin.weight is not layer.weight and torch.equal(twin(x), layer(x))
        with torch.no_grad():
            twin.weight.mul_(2)  # the result follows the weight
        assert torch.equal(twin(x), F.linear(x, fake_quantize_reference(twin.weight, "int4", 32), twin.bias))


def test_autocast_computes_with_the_rounded_values() -> None:
    """Under autocast, the layer multiplies by the weight that QuantizedLinear would dequantise to bf16."""
    layer, x = FakeQuantizedLinear(64, 10, quant_type="nf4"), torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    weight = shoestring.quantize_4bit(layer.weight).dequantize(torch.bfloat16)
    assert torch.equal(y, F.linear(x.bfloat16(), weight, layer.bias.bfloat16()))


def test_compile() -> None:
    layer = FakeQuantizedLinear(64, 6, quant_type="int8")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens, 64)
        y, expected = compiled(x), layer(x)
        assert torch.equal(y, expected)
        for a, b in zip(
            torch.autograd.grad(y.sum(), list(layer.parameters())),
            torch.autograd.grad(expected.sum(), list(layer.parameters())),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_errors() -> None:
    for options, message in (
        ({"quant_type": "nf5"}, "quant_type: expected 'nf4', 'fp4', 'int4' or 'int8', received 'nf5'"),
        ({"block_size": 48}, "block_size: expected one of"),
        (
            {"quant_type": "int8", "block_size": 64},
            "block_size and double_quant: expected None and False with",
        ),
        ({"quant_type": "int4", "double_quant": True}, "double_quant: expected False with quant_type 'int4'"),
    ):
        with pytest.raises(ValueError, match=f"FakeQuantizedLinear: {message}"):
            FakeQuantizedLinear(64, 10, **options)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 33))


def train(model: nn.Module, rank: int | None) -> list[float]:
    # With a smaller eps, AdamW's step for a nearly zero gradient would depend on the order of sums.
    return train_halves(model, shoestring.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4), 33, rank)


def _is_one_process(rank: int, form: dict[str, Any]) -> None:
    sharded, plain = (shoestring.prepare_quantized(net(), **form) for _ in range(2))
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    assert isinstance(sharded[0].weight, DTensor)
    # An element of the weight that rounding puts on the other side of a midpoint changes the loss a little.
    expected, received = train(plain, None), train(sharded, rank)
    assert received == pytest.approx(expected, rel=1e-3) and expected[-1] < expected[0]
    with pytest.raises(
        ValueError, match="convert_quantized: model: expected whole weights, received a DTensor in 0"
    ):
        shoestring.convert_quantized(sharded)
    with pytest.raises(NotImplementedError, match="fake_quantize.*sharding strategy"):
        shoestring.fake_quantize(sharded[0].weight)
    whole = shoestring.prepare_quantized(net(), **form)
    whole.load_state_dict({name: t.full_tensor() for name, t in sharded.state_dict().items()})
    assert isinstance(shoestring.convert_quantized(whole)[0], QuantizedLinear)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3], FORMS[4]], ids=str)
def test_fsdp_is_one_process(form: dict[str, Any], tmp_path: Path) -> None:
    """A layer sees its whole weight under FSDP2, so blocks and scales of any format are the same as without."""
    run(2, tmp_path, _is_one_process, form)


def _mixed_precision(rank: int) -> None:
    seen: list[Tensor] = []
    model = shoestring.prepare_quantized(net(), "nf4")
    model[0].register_forward_hook(
        lambda layer, _, y: seen.extend((layer.weight.detach().clone(), y.detach()))
    )
    x = torch.randn(4, 256)
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).eval()
    with torch.no_grad():
        model(x)
    assert seen[0].dtype == torch.bfloat16
    converted = shoestring.convert_quantized(shoestring.prepare_quantized(net().bfloat16(), "nf4"))
    assert torch.equal(converted[0].weight.dequantize(), shoestring.fake_quantize(seen[0]))


def test_mixed_precision_is_converted_in_bf16(tmp_path: Path) -> None:
    run(2, tmp_path, _mixed_precision)

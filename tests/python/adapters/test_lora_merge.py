"""Test merging of adapters into weights, and exact unmerging.

Merged 16-bit weights are rounded once. If merge quantises a merged weight again, it reports the quantisation
error.
"""

import pytest
import torch
from torch import Tensor, nn

from lora_models import llama, logits, randomise
from shoestring import lora
from shoestring.nn import QuantizedLinear


def held(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("quantize", [None, "nf4", "int4", "int8"])
@pytest.mark.sample(3)
def test_a_thousand_cycles_leave_every_byte(quantize: str | None, requantize: bool) -> None:
    options = {"rank": 2, "target_modules": ["0"], "lora_bias": True}
    model = randomise(lora.apply(nn.Sequential(nn.Linear(64, 8)), quantize=quantize, **options))
    if quantize is None:
        lora.apply(model, rank=2, target_modules=["0"], dora=True, adapter_name="b")
    before, x = held(model), torch.randn(3, 64)
    expected = model(x)
    for cycle in range(1000):
        lora.merge(model, requantize=requantize)
        if cycle == 0:
            kind = QuantizedLinear if quantize and requantize else nn.Linear
            assert type(model[0]) is kind and not any("lora" in key for key in model.state_dict())
        lora.unmerge(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("quantize", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("int4", False), ("int8", False)]
)
def test_requantising_tells_its_error(quantize: str, nested: bool) -> None:
    model = randomise(lora.apply(llama(), rank=4, quantize=quantize, double_quant=nested))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, lora.LoraLinear)}
    exact = {n: m.merged(["default"])["weight"] for n, m in layers.items()}
    base = {n: m.dense_weight() for n, m in layers.items()}
    report = lora.merge(model, requantize=True)
    assert report.layers.keys() == layers.keys()
    total = torch.zeros(2)
    for name, layer in layers.items():
        assert type(layer) is QuantizedLinear and layer.weight.quant_type == quantize
        assert (layer.weight.nested is not None) == nested
        error = (layer.weight.dequantize() - exact[name]).square().sum()
        change = (exact[name] - base[name]).square().sum()
        total += torch.stack([error, change])
        assert report.layers[name] == pytest.approx((error / change).sqrt().item(), rel=1e-4)
    assert report.error == pytest.approx((total[0] / total[1]).sqrt().item(), rel=1e-4)
    assert 0.001 < report.error < 3
    quantised = logits(model)
    lora.unmerge(model)
    # Without requantize, merging stores the weight as an fp32 tensor, with almost no rounding error.
    assert lora.merge(model).error < 1e-6
    assert (logits(model) - quantised).abs().max() < 1


def test_a_small_change_is_lost_in_four_bits() -> None:
    model = lora.apply(nn.Sequential(nn.Linear(64, 32)), rank=2, quantize="nf4", target_modules=["0"])
    nn.init.normal_(model[0].lora_B["default"], std=1e-5)
    report = lora.merge(model, requantize=True)
    assert report.error > 0.5 and report.layers == {"0": report.error}


def test_merges_in_sixteen_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = randomise(
            lora.apply(nn.Sequential(nn.Linear(64, 32, dtype=dtype)), rank=2, dora=True, target_modules=["0"])
        )
        exact = model[0].merged(["default"])
        report = lora.merge(model, reversible=False)
        assert model[0].weight.dtype == model[0].bias.dtype == dtype and 0 < report.error < 1
        assert torch.equal(model[0].weight, exact["weight"].to(dtype))
        with pytest.raises(
            ValueError, match="lora.unmerge: model: expected a model that was merged with reversible=True"
        ):
            lora.unmerge(model)


def test_a_new_adapter_closes_the_way_back() -> None:
    model = lora.apply(nn.Sequential(nn.Linear(8, 8)), rank=2, target_modules=["0"])
    lora.merge(model)
    lora.apply(model, rank=2, target_modules=["0"])
    assert "unmerged" not in model[0].__dict__
    assert lora.merge(model).error == 0  # lora_B is zero, so merging does not change the weight

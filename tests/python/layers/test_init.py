import math

import pytest
import torch
from torch import nn

import shoestring


def decoder(layers: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), layers, enable_nested_tensor=False)


def test_depth_scaled() -> None:
    """The chosen parameters are divided by sqrt(2 layers), all others and the place in memory stay."""
    model = decoder(3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    places = [p.data_ptr() for p in model.parameters()]
    names = shoestring.nn.init.depth_scaled_(model, ["*.out_proj.weight", "layers.?.linear2.weight"], 3)
    assert names == [name for name in before if name.endswith(("out_proj.weight", "linear2.weight"))]
    assert len(names) == 6
    for name, parameter in model.named_parameters():
        factor = 1 / math.sqrt(6) if name in names else 1.0
        torch.testing.assert_close(parameter, before[name] * factor)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert shoestring.nn.init.depth_scaled_(model, "*.norm1.*", 1)[0] == "layers.0.norm1.weight"


def test_the_residual_sum_does_not_grow_with_depth() -> None:
    """Sums of scaled branches have the same deviation for 4 and for 64 layers."""
    deviations = []
    for layers in (4, 64):
        branches = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2 * layers))
        shoestring.nn.init.depth_scaled_(branches, "*", layers)
        x = torch.randn(8, 256)
        with torch.no_grad():
            deviations.append(sum(branch(x) for branch in branches).std().item())
    assert deviations[1] == pytest.approx(deviations[0], rel=0.15)


def test_errors() -> None:
    model = decoder(2)
    before = model.layers[0].linear2.weight.detach().clone()
    message = (
        r"depth_scaled_: patterns: expected a pattern that matches a parameter, received '\*.linear3.weight'. "
        r"Similar names are .*linear2.weight"
    )
    with pytest.raises(ValueError, match=message):
        shoestring.nn.init.depth_scaled_(model, ["*.linear2.weight", "*.linear3.weight"], 2)
    assert torch.equal(model.layers[0].linear2.weight, before)
    with pytest.raises(
        ValueError, match="depth_scaled_: layers: expected a number of at least 1, received 0"
    ):
        shoestring.nn.init.depth_scaled_(model, "*", 0)

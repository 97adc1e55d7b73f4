"""Tests of muP: the table of multipliers, and the coordinate check of arXiv 2203.03466, appendix D."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring

mup_, mup_groups = shoestring.nn.init.mup_, shoestring.nn.init.mup_groups


class Model(nn.Module):
    """A model with every kind of parameter. Its width is 4 times that of its hidden sizes' base."""

    def __init__(self, width: int, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.place = nn.Parameter(torch.randn(7, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.conv = nn.Conv1d(width, width, 3, groups=width)
        self.transposed = nn.ConvTranspose1d(width, 5, 3)
        self.head = nn.Linear(width, 50)
        self.gain = nn.Parameter(torch.ones(3))
        if tied:
            self.head.weight = self.tokens.weight


def multipliers(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, tuple[str, float, float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["kind"], group["lr_multiplier"], group["std_multiplier"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize("base", ["model", "widths"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_table(base: str, optimizer: str) -> None:
    model = Model(64)
    shape: Any = Model(16) if base == "model" else {64: 16, 192: 48, 256: 64}
    groups = mup_groups(model, shape, 0.1, optimizer=optimizer, kinds={"place": "input"})
    found = multipliers(groups, model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    inputs = ("input", 1.0 if optimizer == "adam" else 4.0, 1.0)
    hidden = ("hidden", 0.25 if optimizer == "adam" else 1.0, 0.5)
    output = ("output", 0.25, 0.25)
    assert found["tokens.weight"] == found["place"] == found["up.bias"] == found["norm.weight"] == inputs
    assert (
        found["conv.weight"] == found["attention.in_proj_bias"] == inputs
    )  # a depthwise convolution has fan-in 3
    assert found["attention.in_proj_weight"] == found["up.weight"] == found["down.weight"] == hidden
    assert found["head.weight"] == found["transposed.weight"] == output
    assert found["head.bias"] == found["gain"] == ("fixed", 1.0, 1.0)
    for group in groups:
        assert group["lr"] == 0.1 * group["lr_multiplier"]


def test_widths_that_grow_differently() -> None:
    """A hidden matrix whose fan-in grows 4 times and whose fan-out grows 2 times."""
    model, base = nn.Linear(64, 16), nn.Linear(16, 8)
    found = multipliers(mup_groups(model, base, 1.0), model)
    assert found["weight"] == ("hidden", 0.25, pytest.approx(math.sqrt(2) / 4))
    sgd = multipliers(mup_groups(model, base, 1.0, optimizer="sgd"), model)
    assert sgd["weight"][1] == 0.5


def test_weight_decay_times_rate_is_that_of_the_base() -> None:
    groups = mup_groups(Model(64), Model(16), 0.1, weight_decay=0.2, kinds={"place": "input"})
    assert {round(group["lr"] * group["weight_decay"], 12) for group in groups} == {0.02}


def test_initial_deviations() -> None:
    model, base = Model(256), Model(32)
    with torch.no_grad():
        model.down.weight.zero_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mup_(model, base, kinds={"place": "input"})
    sizes = dict(base.named_parameters())
    for name, p in model.named_parameters():
        kind, _, factor = multipliers(mup_groups(model, base, 1.0, kinds={"place": "input"}), model)[name]
        if kind in ("input", "fixed") or name == "down.weight":
            assert torch.equal(p, before[name])
        else:
            torch.testing.assert_close(p.std(), sizes[name].std() * factor)


def test_frozen_and_tied_parameters() -> None:
    model = Model(64)
    model.tokens.weight.requires_grad_(False)
    groups = mup_groups(model, Model(16), 0.1, kinds={"place": "input"})
    assert all(p is not model.tokens.weight for group in groups for p in group["params"])
    with pytest.raises(
        ValueError,
        match=r'mup_groups: head.weight: expected one role, received that of "input" \(tokens.weight\) and of "ou',
    ):
        mup_groups(Model(64, tied=True), Model(16, tied=True), 0.1, kinds={"place": "input"})


def test_optimizers_take_the_groups() -> None:
    model, base = Model(64), Model(16)
    groups = mup_groups(model, base, 0.1, weight_decay=0.1, kinds={"place": "input"})
    ours = shoestring.optim.AdamW(groups)
    again = shoestring.optim.AdamW(mup_groups(model, base, 0.3, kinds={"place": "input"}))
    model.head(torch.randn(2, 64)).sum().backward()
    ours.step()
    again.load_state_dict(ours.state_dict())
    assert [group["kind"] for group in again.param_groups] == [group["kind"] for group in ours.param_groups]
    torch.optim.AdamW(mup_groups(model, base, 0.1, kinds={"place": "input"})).step()


# ---- the coordinate check

WIDTHS = (64, 128, 256, 512, 1024)


def mlp(width: int) -> nn.Sequential:
    sizes = (32, width, width, width, 10)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def activation_sizes(width: int, mup: bool, optimizer: str, lr: float) -> Tensor:
    """Return by how much the outputs of each layer, and the logits, change in a few steps, per element."""
    model, base = mlp(width), mlp(WIDTHS[0])
    if mup:
        mup_(model, base)
    groups = (
        mup_groups(model, base, lr, optimizer=optimizer)
        if mup
        else [{"params": model.parameters(), "lr": lr}]
    )
    opt = (torch.optim.Adam if optimizer == "adam" else torch.optim.SGD)(groups)
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator)

    def outputs() -> list[Tensor]:
        found, value = [], x
        with torch.no_grad():
            for layer in model:
                value = layer(value)
                if isinstance(layer, nn.Linear):
                    found.append(value)
        return found

    before = outputs()
    for _ in range(4):
        opt.zero_grad()
        F.cross_entropy(model(x), target).backward()
        opt.step()
    return torch.stack([(a - b).square().mean().sqrt() for a, b in zip(outputs(), before, strict=True)])


def slopes(mup: bool, optimizer: str, lr: float) -> Tensor:
    """Return the exponent of the width in the change of each layer's outputs: 0 is flat."""
    changes = []
    for width in WIDTHS:
        runs = []
        for seed in range(3):
            torch.manual_seed(seed)
            runs.append(activation_sizes(width, mup, optimizer, lr))
        changes.append(torch.stack(runs).log2().mean(0))
    y = torch.stack(changes)
    x = torch.tensor([math.log2(width) for width in WIDTHS])
    centred = x - x.mean()
    return (centred[:, None] * (y - y.mean(0))).sum(0) / centred.square().sum()


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 2e-3), ("sgd", 0.1)])
def test_coordinate_check(optimizer: str, lr: float, one_thread: None) -> None:
    """Under muP, steps change the outputs of each layer by amounts that do not depend on the width.

    Without muP, the amounts grow.
    """
    with_mup, without = slopes(True, optimizer, lr), slopes(False, optimizer, lr)
    assert with_mup.abs().max() < 0.2, with_mup
    assert without.max() > 0.4, without


# ---- errors


def test_errors() -> None:
    model, base = Model(64), Model(16)
    for arguments, message in (
        (
            (model, base, 0.1),
            r'kinds: expected "input" or "output" for place, since its module does not tell it, r',
        ),
        ((model, nn.Linear(2, 2), 0.1), "base: expected a parameter place, received none"),
        (
            (nn.Linear(2, 2), {3: 1}, 0.1),
            "base: expected sizes of dimensions, received 3, which no parameter has",
        ),
        ((nn.Linear(2, 2), {2: 0}, 0.1), "base: expected numbers above 0, received 2 and 0"),
    ):
        with pytest.raises(ValueError, match="mup_groups: " + message):
            mup_groups(*arguments)
    with pytest.raises(ValueError, match='mup_groups: optimizer: expected "adam" or "sgd", received "lion"'):
        mup_groups(model, base, 0.1, optimizer="lion")
    with pytest.raises(
        ValueError, match="mup_groups: kinds: expected a pattern that matches a parameter, received"
    ):
        mup_groups(model, base, 0.1, kinds={"places": "input"})
    with pytest.raises(
        ValueError, match='mup_groups: kinds: expected "input" or "output" for "place", recei'
    ):
        mup_groups(model, base, 0.1, kinds={"place": "hidden"})
    conv, other = nn.Linear(4, 4), nn.Conv1d(4, 4, 1)
    with pytest.raises(ValueError, match="mup_groups: base: expected 2 dimensions of weight, received 3"):
        mup_groups(conv, other, 0.1)

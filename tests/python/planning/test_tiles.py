"""Test which layers are planned to leave in tiles, and that plans name them, train with them and refuse other models."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring.checkpoint import weights
from shoestring.checkpoint.tiled_layers import tiled_rows
from shoestring.nn import QuantizedLinear
from shoestring.optim import AdamW

WIDTH, CLASSES, BATCH = 256, 65536, 2
HEAD = 4 * WIDTH * CLASSES  # bytes


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    """A frozen head of 64 MiB behind small trained blocks, all of whole numbers, so that sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.blocks = nn.Sequential(Scale(), Scale())
        with torch.no_grad():
            for p in (*self.first.parameters(), self.head.weight):
                p.copy_(torch.randint(-1, 2, p.shape))
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.blocks(self.first(x)))
        return (y * (torch.arange(CLASSES) % 3 - 1)).sum()


def example_of(model: nn.Module) -> Any:
    return lambda rows: model((torch.arange(rows * 8).view(rows, 8) % 3 - 1).float())


def planned(model: nn.Module, budget: int | None = None) -> shoestring.TrainingPlan:
    return shoestring.plan_training(
        model, example=example_of(model), batch_size=BATCH, device_memory=budget, measure=False
    )


def gradients(model: nn.Module, plan: shoestring.TrainingPlan) -> list[Tensor]:
    """Return the loss and all gradients of a step of a model to which a plan was applied."""
    model.zero_grad()
    applied = plan.apply(model)
    loss = example_of(model)(BATCH)
    loss.backward()
    applied.undo()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.fresh
def test_a_head_that_does_not_fit_is_planned_in_tiles(tmp_path: Path) -> None:
    """The budget has room for half of the head. Loss and gradients are bitwise those of the whole head."""
    torch.manual_seed(0)
    model = Model()
    whole, free = copy.deepcopy(model), planned(model)
    assert free.tiles == {} and "tiles" not in {reason["lever"] for reason in free.reasons}
    budget = free.frontier[0]["peak_bytes"] - HEAD // 2
    with pytest.raises(ValueError, match="device_memory of at least"):
        planned(model, budget)
    assert shoestring.plan_tiles(model, 2 * HEAD + 2 * 8192) == {}
    tiles = shoestring.plan_tiles(model, HEAD // 8)
    assert tiles == {"head": -(-CLASSES // 17)}  # two of 16 tiles fill the room, without their padding
    shoestring.tile_layers(model, tiles)
    handle = shoestring.offload_weights(model, f"nvme:{tmp_path}")
    plan = planned(model, budget)
    assert plan.tiles == tiles and plan.peak <= budget
    (reason,) = [one["text"] for one in plan.reasons if one["lever"] == "tiles"]
    assert (
        reason
        == f"head in tiles of {tiles['head']} rows: takes 64.0 MiB whole, of a budget of {budget / 2**20:.1f} MiB"
    )
    assert reason in str(plan)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, plan), gradients(whole, free), strict=True))
    check = plan.check(model, example_of(model))
    assert check.measured_bytes <= 1.05 * check.predicted_bytes
    assert handle.statistics()["device"] <= HEAD // 8

    plan.save(tmp_path / "plan.json")
    again = shoestring.TrainingPlan.load(tmp_path / "plan.json")
    assert again.tiles == tiles and again.to_dict() == plan.to_dict()
    copied = copy.deepcopy(whole)
    for other, one, message in (
        (whole, again, f"head: expected tiles of {tiles['head']} rows, as planned, received a whole layer; call tile_layers"),
        (model, free, f"head: expected a whole layer, as planned, received tiles of {tiles['head']} rows; call tile_layers"),
        (nn.Linear(8, 8), again, f"head: expected tiles of {tiles['head']} rows, as planned, received no such layer; call "),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^TrainingPlan: apply: model: {message}.*\\Z"):
            one.apply(other)
    shoestring.tile_layers(copied, again.tiles)
    again.apply(copied).undo()


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).sum(-1, keepdim=True) for layer in self.children()), torch.zeros(1))


class Block(nn.Module):
    """Layers of one input. Those of odd numbers are in an inner module."""

    def __init__(self, sizes: list[int], quantize: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()
        for i, size in enumerate(sizes):
            layer: nn.Module = nn.Linear(WIDTH, size, bias=i == 0)
            if quantize is not None:
                name, _, nested = quantize.partition(", ")
                layer = QuantizedLinear.from_linear(layer, name, double_quant=bool(nested))  # type: ignore[arg-type]
            (self.inner if i % 2 else self).add_module(f"layer{i}", layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + sum(
            (m(x).sum(-1, keepdim=True) for m in self.children() if m is not self.norm), torch.zeros(1)
        )


def blocks_of(*sizes: int, quantize: str | None = None, count: int = 3) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(*(Block([*sizes], quantize) for _ in range(count)))})


def test_only_what_does_not_fit_is_tiled() -> None:
    model = blocks_of(512, 512, 2048).requires_grad_(False)
    names = [f"blocks.{i}.layer2" for i in range(3)]
    block = 4 * WIDTH * 3072
    padding = 2 * 8192
    assert shoestring.plan_tiles(model, 2 * block + padding) == {}
    # Only the block is too large: its largest layer leaves in one tile, so that the others leave by themselves.
    found = shoestring.plan_tiles(model, 2 * block + padding - 1)
    assert found == dict.fromkeys(names, 2048)
    assert shoestring.plan_tiles(model, 2 * 4 * WIDTH * 2048 + padding) == found
    assert shoestring.plan_tiles(model, 2 * 4 * WIDTH * 1024 + padding) == dict.fromkeys(names, 1024)
    some = shoestring.plan_tiles(model, 2 * 4 * WIDTH * 511 + padding)
    assert some == dict.fromkeys(names, 410) | {f"blocks.{i}.layer0": 256 for i in range(3)} | {
        f"blocks.{i}.inner.layer1": 256 for i in range(3)
    }
    # Trained weights are three at a time, and stay without an optimizer.
    model.requires_grad_(True)
    assert shoestring.plan_tiles(model, "1KiB") == {}
    assert shoestring.plan_tiles(model, 3 * (4 * WIDTH * 1024 + 8192), trained=True) == dict.fromkeys(
        names, 1024
    )
    with torch.device("meta"):
        model = blocks_of(512, 512, 2048).requires_grad_(False)
    assert shoestring.plan_tiles(model, 2 * 4 * WIDTH * 511 + padding) == some


@pytest.mark.parametrize("kind", ["frozen", "trained", "nf4", "nf4, nested", "int8"])
def test_weights_on_their_way_fit_into_the_room(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LEAST", 1024)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    trained = kind == "trained"
    sizes = [draw.randrange(64, 1500, 64) for _ in range(3)]
    model = blocks_of(*sizes, quantize=None if kind in ("frozen", "trained") else kind, count=4)
    model.requires_grad_(trained)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        expected = model["blocks"](x)
    room = draw.randint(600_000, 4_000_000) // (1 if kind in ("frozen", "trained") else 6)
    print(sizes, room)
    tiles = shoestring.plan_tiles(model, room, trained=trained)
    shoestring.tile_layers(model, tiles)
    assert tiled_rows(model) == tiles
    optimizer = (
        AdamW(model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=True) if trained else None
    )
    handle = shoestring.offload_weights(model, f"nvme:{tmp_path}", optimizer=optimizer)
    most = 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, handle.statistics()["device"])

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(watch)
            module.register_full_backward_hook(watch)
    y = model["blocks"](x.requires_grad_())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    y.square().mean().backward()
    assert 0 < most <= room


def test_what_cannot_be_planned_in_tiles() -> None:
    model = blocks_of(512, 2048).requires_grad_(False)
    for room in ("much", 0):
        with pytest.raises(ValueError, match=r"^plan_tiles: room: expected a number of bytes.*\Z"):
            shoestring.plan_tiles(model, room)
    with pytest.raises(
        ValueError, match=r"^plan_tiles: room: expected at least \d+ bytes, for 2 times .*inner.layer1.*\Z"
    ):
        shoestring.plan_tiles(model, 100_000)
    convolutions = nn.Module()
    convolutions.blocks = nn.Sequential(nn.Conv1d(128, 128, 3), nn.Conv1d(128, 128, 3)).requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"for 2 times the weights of blocks.0 or its smallest tiles, received 9999"
    ):
        shoestring.plan_tiles(convolutions, 9999)
    shoestring.tile_layers(model, {"blocks.0.layer0": 100})
    with pytest.raises(
        ValueError, match=r"^plan_tiles: model: expected whole layers, received blocks.0.layer0 in tiles"
    ):
        shoestring.plan_tiles(model, "1GiB")

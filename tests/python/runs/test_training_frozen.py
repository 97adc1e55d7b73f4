"""save_training of weights that were trained and are frozen, and of adapters that are not active."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import lora, optim
from shoestring.files.safetensors_file import open_safetensors


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for i in range(first, first + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2),
    "GaLore": lambda params: optim.GaLore(params, lr=1e-2, rank=4),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("order", [False, True], ids=["freezes as the run", "all trained"])
def test_weights_that_were_trained_and_frozen_come_back(kind: str, order: bool, tmp_path: Path) -> None:
    through = model()
    through[2].requires_grad_(False)
    optimizer = OPTIMIZERS[kind](through.parameters())
    train(through, optimizer, 0, 3)
    through[0].requires_grad_(False)
    shoestring.save_training(tmp_path / "run", through, optimizer, step=3)
    names = open_safetensors(tmp_path / "run", "").tensors()
    assert "model.0.weight" in names and "model.2.weight" not in names
    resumed = model()
    resumed[2].requires_grad_(False)
    if not order:
        resumed[0].requires_grad_(False)
    again = OPTIMIZERS[kind](resumed.parameters())
    assert shoestring.load_training(tmp_path / "run", resumed, again).step == 3
    assert same(resumed, through)
    for net, stepped in ((through, optimizer), (resumed, again)):
        net[0].requires_grad_(True)
        train(net, stepped, 3, 2)
    assert same(resumed, through)


def test_adapters_that_are_not_active_come_back(tmp_path: Path) -> None:
    base = model()
    head = dict(rank=2, target_modules=["0"], modules_to_save=["2"])

    def adapted() -> nn.Module:
        net = lora.apply(copy.deepcopy(base), **head, adapter_name="first")
        return lora.apply(net, **head, adapter_name="second")

    through = adapted()
    for i, name in enumerate(("first", "second")):
        lora.set_adapter(through, name)
        trained = [p for p in through.parameters() if p.requires_grad]
        train(through, optim.AdamW(trained, lr=1e-2), 2 * i, 2)
    shoestring.save_training(tmp_path / "run", through)
    for active in ("second", "first"):
        resumed = adapted()
        lora.set_adapter(resumed, active)
        shoestring.load_training(tmp_path / "run", resumed)
        assert same(resumed, through)


def test_a_file_without_frozen_weights_is_as_before(tmp_path: Path) -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    train(net, optimizer, 0, 1)
    shoestring.save_training(tmp_path / "run", net, optimizer)
    assert "also" not in open_safetensors(tmp_path / "run", "").metadata()
    other = model()
    other[0].requires_grad_(False)
    with pytest.raises(ValueError, match="received '0.bias' in the file alone"):
        shoestring.load_training(tmp_path / "run", other, optim.AdamW(other.parameters()))

"""Test adapter files, and merging, of models that two processes have split (CPU, Gloo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoestring
from processes import run, whole
from shoestring import lora
from shoestring.core.dtensors import is_dtensor

WEIGHTS = "adapter_model.safetensors"


def _adapted(seed: int, dora: bool) -> nn.Module:
    """Return a model of one base, with adapters whose values depend on the seed."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
    lora.apply(net, rank=4, target_modules=["0", "2"], dora=dora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return net


def _values(net: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p).detach().clone() for name, p in net.named_parameters()}


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _split(rank: int, folder: Path, dora: bool) -> None:
    net = _adapted(1, dora)
    shoestring.parallelize(net, "zero3")
    assert any(is_dtensor(p) for p in net.parameters() if p.requires_grad)
    lora.save_adapter(net, folder / "split")
    assert _equal(load_file(folder / "split" / WEIGHTS), load_file(folder / "alone" / WEIGHTS))
    lora.load_adapter(net, folder / "other")
    expected = _adapted(2, dora)
    assert _equal(_values(net), _values(expected))
    with pytest.raises(ValueError, match=r"lora\.merge: model: expected whole parameters"):
        lora.merge(net)
    assert _equal(_values(net), _values(expected)) and lora.adapter_names(net) == ["default"]


@pytest.mark.parametrize("dora", [False, True])
def test_split_adapters_are_saved_and_loaded_as_whole_ones(tmp_path: Path, dora: bool) -> None:
    lora.save_adapter(_adapted(1, dora), tmp_path / "alone")
    lora.save_adapter(_adapted(2, dora), tmp_path / "other")
    run(2, tmp_path, _split, tmp_path, dora)


def _unmerged(rank: int) -> None:
    net = _adapted(1, False)
    lora.merge(net)
    shoestring.parallelize(net.requires_grad_(True), "zero3")
    before = _values(net)
    with pytest.raises(ValueError, match=r"lora\.unmerge: model: expected whole parameters"):
        lora.unmerge(net)
    assert _equal(_values(net), before)


def test_split_models_are_not_unmerged(tmp_path: Path) -> None:
    run(2, tmp_path, _unmerged)

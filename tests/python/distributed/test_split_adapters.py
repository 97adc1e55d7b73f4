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


def _adapted(seed: int, dora: bool, **options: Any) -> nn.Module:
    """Return a model of one base, with adapters whose values depend on the seed."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    lora.apply(net, rank=4, target_modules=["0", "2"], dora=dora, **options)
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


def _train(net: nn.Module, rows: slice) -> Tensor:
    """Take three steps on the rows of a batch, and return the outputs afterwards."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 64, generator=generator), torch.randn(8, 3, generator=generator)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.03)
    for _ in range(3):
        optimizer.zero_grad()
        (net(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return net(x).detach()


def _split_over_nf4(rank: int, folder: Path, expected: Tensor) -> None:
    net = _adapted(1, False, quantize="nf4")
    shoestring.parallelize(net, "zero3")
    assert isinstance(net[0].weight, torch.distributed.tensor.DTensor)
    torch.testing.assert_close(_train(net, slice(rank, None, 2)), expected, rtol=1e-5, atol=1e-5)
    lora.save_adapter(net, folder / "split")
    lora.load_adapter(net, folder / "other")
    lora.save_adapter(net, folder / "again")


def test_adapters_over_split_nf4_weights_train_as_in_one_process(tmp_path: Path) -> None:
    alone = _adapted(1, False, quantize="nf4")
    former = dict(alone.named_parameters())["0.lora_A.default"].detach().clone()
    expected = _train(alone, slice(None))
    lora.save_adapter(alone, tmp_path / "alone")
    other = _adapted(2, False, quantize="nf4")
    lora.save_adapter(other, tmp_path / "other")
    run(2, tmp_path, _split_over_nf4, tmp_path, expected)
    split = load_file(tmp_path / "split" / WEIGHTS)
    torch.testing.assert_close(split, load_file(tmp_path / "alone" / WEIGHTS), rtol=1e-5, atol=1e-6)
    assert (split["base_model.model.0.lora_A.weight"] - former).abs().max() > 1e-2
    assert _equal(load_file(tmp_path / "again" / WEIGHTS), load_file(tmp_path / "other" / WEIGHTS))


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

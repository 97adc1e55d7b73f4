"""Test the files of runs whose weights FSDP2 has split: they are those of one process (CPU, Gloo)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoestring
from processes import model, run, train, whole
from shoestring.optim import CAME, AdamW

# The rows of the first matrix are blocks of 256 elements, and those of the second are not: its codes are made again.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (AdamW, dict(state_format="8bit")),  # of a model whose rows are all blocks
    "8bit": (AdamW, dict(state_format="8bit")),
    "4bit": (AdamW, dict(state_format="4bit")),
    "fp32": (AdamW, dict(state_format="fp32")),
    "came": (CAME, dict(state_format="fp32")),
    "torch": (torch.optim.AdamW, {}),
}


def made(name: str, sharded: bool, replicas: int = 1) -> tuple[nn.Module, Any]:
    net = model()
    if name == "blocks":
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False))
    if sharded:
        world = torch.distributed.get_world_size()
        shape, names = (
            ((world,), ("split",)) if replicas == 1 else ((replicas, world // replicas), ("copy", "split"))
        )
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    kind, options = CASES[name]
    return net, kind(net.parameters(), **options)


def weights(net: nn.Module) -> list[Tensor]:
    return [whole(p).detach().clone() for p in net.parameters()]


def _save(rank: int, folder: str, name: str, replicas: int) -> None:
    net, optimizer = made(name, True, replicas)
    train(net, optimizer, range(3))
    shoestring.save_training(f"{folder}/run.safetensors", net, optimizer, step=3, position={"row": 7})
    saved = weights(net)
    train(net, optimizer, range(3, 5))
    after = weights(net)
    if rank == 0:
        torch.save((saved, after), f"{folder}/weights.pt")


def _load(rank: int, folder: str, name: str, sharded: bool, is_same: bool) -> None:
    net, optimizer = made(name, sharded)
    position = shoestring.load_training(f"{folder}/run.safetensors", net, optimizer)
    assert position == shoestring.TrainingPosition(3, {"row": 7})
    saved, after = torch.load(f"{folder}/weights.pt")
    for p, q in zip(weights(net), saved, strict=True):
        assert torch.equal(p, q)
    if not sharded:
        again = f"{folder}/again.safetensors"
        shoestring.save_training(again, net, optimizer, step=3, position={"row": 7})
        assert Path(again).read_bytes() == Path(f"{folder}/run.safetensors").read_bytes()
    train(net, optimizer, range(3, 5))
    for p, q in zip(weights(net), after, strict=True):
        if is_same:
            assert torch.equal(p, q)
        torch.testing.assert_close(p, q, rtol=0.02, atol=4e-3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.sample(3)
def test_files_are_those_of_one_process(name: str, world: int, replicas: int, tmp_path: Path) -> None:
    """Any number of processes continues the run. The same number does so bit for bit, unless codes are made again."""
    folder = str(tmp_path)
    run(world, tmp_path, _save, folder, name, replicas)
    is_same = name not in ("8bit", "4bit") and replicas == 1
    run(world, tmp_path, _load, folder, name, True, is_same)
    run(1, tmp_path, _load, folder, name, False, False)
    run(2, tmp_path, _load, folder, name, True, False)


def _disk_full(rank: int) -> None:
    net, optimizer = made("fp32", True)
    train(net, optimizer, range(1))
    if rank == 0:
        with pytest.raises(OSError, match="directory") as error:
            shoestring.save_training("/dev/full/run.safetensors", net, optimizer)
        assert error.value.errno in (errno.ENOSPC, errno.ENOTDIR)
    else:
        shoestring.save_training("/dev/full/run.safetensors", net, optimizer)
    train(net, optimizer, range(1, 2))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The first process raises, and the others do not wait for it."""
    run(2, tmp_path, _disk_full)

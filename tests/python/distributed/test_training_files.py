"""Test the files of runs whose weights or state processes have split: they are those of one process (CPU, Gloo)."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoestring
from processes import model, run, train, whole
from shoestring.optim import CAME, Adafactor, AdamW, Lion, load_optimizer, save_optimizer
from shoestring.optim.host_copy import HostCopy

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


# ---- state that shard has split

SPLIT: dict[str, tuple[Any, dict[str, Any]]] = {
    "8bit": (AdamW, dict(state_format="8bit", weight_decay=0.1)),
    "4bit": (AdamW, dict(state_format="4bit")),
    "lion": (Lion, dict(state_format="bf16")),
    "came": (CAME, dict(lr=1e-3)),  # whole matrices, each of one process
    "adafactor": (Adafactor, dict(lr=1e-2)),
}
ROWS = 192


class Empty(nn.Module):
    """A layer whose parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


def deep(name: str) -> tuple[nn.Module, Any]:
    """Return layers of which no tensor of state is much of the whole, and an optimizer of two groups."""
    torch.manual_seed(5)
    net = nn.Sequential(Empty(), *(nn.Linear(ROWS, ROWS) for _ in range(8)), nn.Linear(ROWS, 3), Empty())
    params = list(net.parameters())
    kind, options = SPLIT[name]
    return net, kind([{"params": params[:5]}, {"params": params[5:], "lr": 2e-3}], **options)


def split_batch(step: int) -> Tensor:
    return torch.randn(4, ROWS, generator=torch.Generator().manual_seed(step))


def state_in(path: str) -> dict[str, Tensor]:
    found = load_file(path)
    return {name: tensor for name, tensor in found.items() if not name.startswith("random.")}


def trained_split(name: str, gradients: bool) -> tuple[nn.Module, Any]:
    net, optimizer = deep(name)
    shoestring.distributed.shard(optimizer, gradients=gradients)
    train(net, optimizer, range(2), split_batch)
    return net, optimizer


def taken(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a function, and the most bytes that it had allocated at a time."""
    gc.collect()
    with shoestring.host_allocator() as allocator:
        before = allocator.stats().allocated
        allocator.reset_peaks()
        return function(), allocator.stats().peak_allocated - before


def _split(rank: int, folder: str, name: str, gradients: bool) -> None:
    path, world = f"{folder}/run.safetensors", torch.distributed.get_world_size()
    net, optimizer = trained_split(name, gradients)
    for save in (shoestring.save_training, lambda path, _, opt: save_optimizer(opt, path + ".optimizer")):
        _, saving = taken(lambda: save(path, net, optimizer))
        torch.distributed.barrier()
        whole_state = sum(t.nbytes for key, t in state_in(path).items() if key.startswith("optimizer."))
        largest = max(t.nbytes for t in state_in(path).values())
        # One tensor, the copies of it that the processes send, and the message
        assert saving <= 4 * largest + 65536, (saving, largest, whole_state)

    alone_net, alone = deep(name)
    train(alone_net, alone, range(2), split_batch)
    if rank == 0:
        shoestring.save_training(f"{folder}/alone.safetensors", alone_net, alone)
        expected, found = state_in(f"{folder}/alone.safetensors"), state_in(path)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, found[key]), key
    whole_dict = alone.state_dict()["state"]
    for key, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, whole_dict[key][entry]) for entry, value in entries.items())
        assert entries.keys() == whole_dict[key].keys()
    for to in range(world):
        optimizer.consolidate_state_dict(to)
        if rank == to:
            assert optimizer.state_dict()["state"].keys() == whole_dict.keys()

    copy, copied = taken(lambda: HostCopy([], [optimizer]))
    assert copied <= whole_state / world + 2 * largest + 65536, (copied, whole_state)
    optimizer.param_groups[0]["lr"] = 0.5
    before = [p.clone() for p in net.parameters()]
    train(net, optimizer, range(7, 8), split_batch)
    copy.restore()
    with torch.no_grad():
        for p, q in zip(net.parameters(), before, strict=True):
            p.copy_(q)

    train(net, optimizer, range(2, 4), split_batch)
    for load in (
        lambda net, opt: shoestring.load_training(path, net, opt),
        lambda net, opt: load_optimizer(opt, path + ".optimizer"),
    ):
        again, resumed = deep(name)
        shoestring.distributed.shard(resumed, gradients=gradients)
        for p, q in zip(again.parameters(), alone_net.parameters(), strict=True):
            p.data.copy_(q)
        _, loading = taken(lambda: load(again, resumed))
        # The file as it is checked, a tensor at a time, and the part of this process, some of which is by whole matrices
        assert loading <= whole_state / world + 4 * largest + 65536, (loading, whole_state, largest)
        train(again, resumed, range(2, 4), split_batch)
        for p, q in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("world", "gradients"), [(2, False), (2, True), (3, False)])
@pytest.mark.sample(3)
def test_split_state_is_saved_by_tensors_and_loaded_by_parts(
    name: str, world: int, gradients: bool, tmp_path: Path
) -> None:
    """No process has the whole state, in a file that is that of one process. It continues bit for bit."""
    run(world, tmp_path, _split, str(tmp_path), name, gradients)

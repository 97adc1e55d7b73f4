"""Helpers for distributed tests: start several CPU processes with Gloo, and a small model that they train."""

import multiprocessing
import multiprocessing.forkserver
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from ports import free_port

# Importing torch takes each process seconds. So a server process imports everything once, and forks the
# others.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "pytest",
    "shoestring",
]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Let the server process import more modules. A server that runs already ends, and a new one starts."""
    server: Any = multiprocessing.forkserver._forkserver
    server._stop()
    server.set_forkserver_preload([*PRELOADED, *modules])


def _process(
    rank: int, world: int, store: str, task: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(1234)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    task(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, folder: Path, task: Callable[..., None], *arguments: Any) -> None:
    """Run ``task`` in `world` processes; raise the first exception of any process."""
    store = folder / f"store{len(list(folder.iterdir()))}"
    torch.multiprocessing.start_processes(
        _process, (world, str(store), task, arguments), nprocs=world, start_method="forkserver"
    )


def _launched(
    rank: int, world: int, port: int, task: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if world > 1:
        own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
        os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    task(*arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def launch(world: int, task: Callable[..., None], *arguments: Any) -> None:
    """Run ``task`` in `world` processes with the environment of torchrun; raise the first exception of any process.

    The task, or the framework that it tests, connects the processes. One process has no such environment.
    """
    torch.multiprocessing.start_processes(
        _launched, (world, free_port(), task, arguments), nprocs=world, start_method="forkserver"
    )


def model(dtype: torch.dtype = torch.float32) -> Module:
    """Return a model whose rows fill one block of 256 optimizer state values, or only part of a block.

    Its last layer has 3 rows, so that one of four processes gets none of them.
    """
    generator = torch.Generator().manual_seed(7)
    found = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    return found.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    net: Module, opt: torch.optim.Optimizer, steps: range, batches: Callable[[int], Tensor] = batch
) -> None:
    for step in steps:
        opt.zero_grad()
        net(batches(step)).square().mean().backward()
        opt.step()


def train_halves(
    net: Module, optimizer: torch.optim.Optimizer, features: int, rank: int | None
) -> list[float]:
    """Take four steps on 8 rows of 256 features, of which each of two processes has half. Return the losses.

    ``features`` is the size of the output. With ``rank=None`` this process has all rows.
    """
    losses = []
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 256, generator=generator), torch.randn(8, features, generator=generator)
    if rank is not None:
        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
    for _ in range(4):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        whole_loss = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(whole_loss)
            whole_loss /= 2
        losses.append(whole_loss.item())
    return losses


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def assert_replicated(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, tensor.contiguous(), group=group)
    assert all(torch.equal(tensor, other) for other in others)

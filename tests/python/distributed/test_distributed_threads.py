"""Test that several threads may use one object of ``shoestring.distributed``: their calls wait for each other."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from processes import run
from shoestring.distributed import DiLoCo, LocalSGD
from shoestring.distributed.compress import compressor
from threads import together

STEPS = 400


@pytest.fixture
def one_process() -> Iterator[None]:
    """Make a group of this process alone, and let threads take turns often."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def often(function: Callable[[], Any], times: int = STEPS) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(times):
            function()

    return calls


@pytest.mark.parametrize("kind", ["diloco", "local", "overlap", "split"])
@pytest.mark.usefixtures("one_process")
def test_threads_step_and_read(kind: str) -> None:
    """Averages over one process do not change the weights, so the result is that of no step."""
    net = model()
    if kind == "split":
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    make = LocalSGD if kind == "local" else DiLoCo
    averages = make(optimizer, every=2, fragments=2, overlap=int(kind == "overlap"))
    shared = copy.copy(averages)  # made before the first call

    def read() -> None:
        state = averages.state_dict()
        assert state["steps"] <= averages.steps
        assert [tensor.numel() for tensor in state["anchor"]] == sizes
        assert averages._core.sent_bytes() == averages._core.residual_bytes() == 0

    sizes = [tensor.numel() for tensor in averages.state_dict()["anchor"]]
    together(often(averages.step), often(shared.step), often(read), often(averages.average))
    assert averages.steps == shared.steps == 2 * STEPS
    averages.average()
    for p, q in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("other", ["regroup", "load_state_dict"])
def test_other_calls_beside_a_step(other: str) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    averages = DiLoCo(optimizer, every=2, fragments=2, overlap=1)
    often(averages.step)()
    saved = copy.deepcopy(averages.state_dict())
    together(
        often(averages.step),
        often(averages.step),
        often(lambda: averages.load_state_dict(saved) if other == "load_state_dict" else averages.regroup()),
    )
    assert other == "load_state_dict" or averages.steps == 3 * STEPS
    assert all(p.isfinite().all() for group in optimizer.param_groups for p in group["params"])


def _compresses(rank: int) -> None:
    core = compressor(dist.group.WORLD, "8bit")
    gradient = torch.linspace(-1, 1, 512)
    # A code of 8 bits is off by 1 / 254 of the largest element, in each hop of this step and of the last one.
    close = partial(torch.testing.assert_close, rtol=0, atol=4 / 254)

    def reduce(index: int) -> None:
        own = gradient.clone()
        core.all_reduce(own, [], index, True).wait()
        close(own, gradient)

    def scatter(key: int) -> None:
        own = torch.empty(256)
        core.reduce_scatter(own, gradient, key)
        close(own, gradient.chunk(2)[rank])

    def read() -> None:
        assert core.residual_bytes() % (4 * 256) == 0 and core.sent_bytes() % 2 == 0

    for function in (reduce, scatter):
        together(often(partial(function, 0), 50), often(partial(function, 1), 50), often(read))
    assert core.residual_bytes() == 2 * 4 * (512 + 256) + 2 * 4 * 512


def test_threads_compress_with_one_compressor(tmp_path: Path) -> None:
    """Ranks issue the same collectives, whichever of their threads comes first."""
    run(2, tmp_path, _compresses)

"""Parameters that a backward leaves without a gradient, on all ranks or on some, with each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring
from processes import run, whole
from shoestring.optim import SGD, AdamW


class Branches(nn.Module):
    """A model with three branches, of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[each](x) for each in used]).square().mean()


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def _trained(used: list[list[int]], zeros: bool) -> Branches:
    """Train in one process, as the ranks together do; ``zeros`` replaces gradients that are missing."""
    net = Branches()
    opt = SGD(net.parameters(), lr=0.1, state_format="fp32")
    for step in range(3):
        for rank, own in enumerate(used):
            (net(_inputs(step, rank), own) / len(used)).backward()
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and zeros else p.grad
        opt.step()
        opt.zero_grad()
    return net


def _left_out(rank: int) -> None:
    """Take steps of two micro-batches, of which the last one leaves out what the first one has used."""
    for strategy, first, last in [
        *((strategy, [[0], [0]], [[1], [1]]) for strategy in ("ddp", "zero1", "zero2", "zero3")),
        *((strategy, [[0, 1], [1, 2]], [[1], [2]]) for strategy in ("ddp", "zero1", "zero2")),
    ]:
        net, whole_net = Branches(), Branches()
        report = shoestring.parallelize(net, strategy, find_unused=strategy != "zero3")
        opts = [SGD(each.parameters(), lr=0.1, state_format="fp32") for each in (net, whole_net)]
        for step in range(3):
            with report.no_sync():
                net(_inputs(step, rank), first[rank]).backward()
            net(_inputs(step + 10, rank), last[rank]).backward()
            for other in range(2):
                for at, used in ((step, first[other]), (step + 10, last[other])):
                    (whole_net(_inputs(at, other), used) / 2).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        for (name, p), q in zip(net.named_parameters(), whole_net.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q, msg=f"{strategy} {first} {last} {name}")
        report.undo()


def _unused(rank: int) -> None:
    for strategy, used in [
        *((strategy, [[0, 1], [0, 1]]) for strategy in ("ddp", "zero1", "zero2", "zero3")),
        *((strategy, [[0, 1], [1]]) for strategy in ("ddp", "zero1", "zero2")),
    ]:
        net = Branches()
        report = shoestring.parallelize(net, strategy, find_unused=strategy != "zero3")
        opt = SGD(net.parameters(), lr=0.1, state_format="fp32")
        for step in range(3):
            net(_inputs(step, rank), used[rank]).backward()
            opt.step()
            opt.zero_grad()
        expected = dict(_trained(used, strategy == "zero2").named_parameters())
        for name, p in net.named_parameters():
            torch.testing.assert_close(whole(p), expected[name], msg=f"{strategy} {used} {name}")
        report.undo()
    net = Branches()
    for strategy in ("zero3", "hsdp"):
        mesh: Any = (1, 2) if strategy == "hsdp" else None
        with pytest.raises(ValueError, match=f"parallelize: find_unused: expected False with '{strategy}'"):
            shoestring.parallelize(net, strategy, mesh=mesh, find_unused=True)
    # without the option, the error advises it
    report = shoestring.parallelize(net, "zero2")
    opt = AdamW(net.parameters())
    with pytest.raises(RuntimeError, match=r"does not use parameter .*\. Freeze them .* or pass find_unused"):
        net(_inputs(0, rank), [0]).backward()
        opt.step()
    opt.found_inf = torch.zeros(())
    with pytest.raises(RuntimeError, match="expected neither a GradScaler nor a Guard of the optimizer"):
        opt.step()
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("task", [_unused, _left_out])
def test_unused_parameters(task: Any, tmp_path: Path) -> None:
    run(2, tmp_path, task)

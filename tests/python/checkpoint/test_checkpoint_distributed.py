"""checkpoint_model changes no gradient if applied before or after DDP and FSDP2, or before torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shoestring
from processes import run
from shoestring.checkpoint.measure import metered


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), Block())


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    grads: list[Tensor] = []
    for _ in range(2):  # the second step tests that hooks and shards still work after a backward pass
        net.zero_grad()
        net(x).square().mean().backward()
        grads += [p.grad for p in net.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def _gives_the_same_gradients(rank: int, kind: str, keep: tuple[str, ...]) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))
    results = []
    for checkpointed in (True, False):
        net = model()
        if checkpointed:
            report = shoestring.checkpoint_model(net, [Block], keep=keep)
            assert [name for name, _ in report.blocks] == ["0", "1", "2"]
        if kind == "ddp":
            net = DistributedDataParallel(net)
        else:
            for block in net:
                fully_shard(block, reshard_after_forward=True)
            fully_shard(net)
        results.append(gradients(net, x))
    assert len(results[0]) == 36
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("keep", [(), ("products",)], ids=str)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(tmp_path: Path, kind: str, keep: tuple[str, ...]) -> None:
    run(2, tmp_path, _gives_the_same_gradients, kind, keep)


def _keeps_a_budget(rank: int, kind: str, first: str) -> None:
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(rank))
    results, peaks = [], []
    for budgeted in (False, True):
        net = model()
        whole = net

        def wrap(net: nn.Module) -> nn.Module:
            if kind == "ddp":
                return DistributedDataParallel(net)
            for block in net:
                fully_shard(block, reshard_after_forward=True)
            return fully_shard(net)

        def step() -> Tensor:
            return whole(x * 1).square().mean()

        if first == "wrapped":
            whole = wrap(net)
            gradients(whole, x)
        before = [p.grad for p in net.parameters()]
        if budgeted:
            budget = int(0.75 * peaks[0])
            report = shoestring.checkpoint_model(net, [Block], budget=budget, example=step)
            assert report.plan is not None and "recompute" in report.plan.names
        assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))
        if first == "planned":
            whole = wrap(net)
        results.append(gradients(whole, x))
        with metered() as meter:
            step().backward()
            peaks.append(meter.peak())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # Besides the activations, the measured peak includes the gathered weights and their gradients.
    weights = sum(p.numel() for p in model().parameters()) * 4
    assert peaks[1] <= budget + 2 * weights
    assert abs(report.plan.peak_bytes - peaks[1]) <= 0.05 * peaks[1] + 2 * weights


@pytest.mark.parametrize("first", ["planned", "wrapped"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_budget(tmp_path: Path, kind: str, first: str) -> None:
    run(2, tmp_path, _keeps_a_budget, kind, first)


def _refuses_shards_within_blocks(rank: int) -> None:
    net = model()
    for block in net:
        fully_shard(block.up)
        fully_shard(block)
    with pytest.raises(
        ValueError, match="blocks: 0.up is sharded separately inside 0: make the plan before fully_shard"
    ):
        shoestring.checkpoint_model(
            net, [Block], budget="1MiB", example=lambda: net(torch.randn(4, 32)).sum()
        )


def test_shards_within_blocks(tmp_path: Path) -> None:
    run(2, tmp_path, _refuses_shards_within_blocks)


@pytest.mark.parametrize("keep", [(), ("products",)], ids=str)
def test_compiled(keep: tuple[str, ...]) -> None:
    # torch.compile limits the number of recompilations. The reset keeps those of other tests from counting.
    torch.compiler.reset()
    net, x = model(), torch.randn(4, 32)
    expected = gradients(net, x)
    shoestring.checkpoint_model(net, [Block], keep=keep)
    for ours, plain in zip(
        gradients(torch.compile(net, backend="aot_eager", fullgraph=True), x), expected, strict=True
    ):
        torch.testing.assert_close(ours, plain)

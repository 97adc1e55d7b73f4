"""checkpoint_model before DDP, FSDP2 and torch.compile: the gradients without checkpoints, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shoestring


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
    for _ in range(2):  # a second step: hooks and shards are used again
        net.zero_grad()
        net(x).square().mean().backward()
    grads = [p.grad for p in net.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]


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
    assert len(results[0]) == 18
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("keep", [(), ("products",)], ids=str)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(tmp_path: Path, kind: str, keep: tuple[str, ...]) -> None:
    run(2, tmp_path, _gives_the_same_gradients, kind, keep)


@pytest.mark.parametrize("keep", [(), ("products",)], ids=str)
def test_compiled(keep: tuple[str, ...]) -> None:
    torch.compiler.reset()  # what other tests compiled counts towards the same limit
    net, x = model(), torch.randn(4, 32)
    expected = gradients(net, x)
    shoestring.checkpoint_model(net, [Block], keep=keep)
    for ours, plain in zip(gradients(torch.compile(net, backend="aot_eager", fullgraph=True), x), expected, strict=True):
        torch.testing.assert_close(ours, plain)

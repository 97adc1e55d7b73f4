"""Training on the device equals training on the CPU, bit for bit."""

import copy

import torch
from torch import Tensor, nn

from simdev import device as simdev


def train(model: nn.Module, device: str) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 32, generator=generator).to(device, non_blocking=True)
        y = torch.randint(0, 10, (16,), generator=generator).to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_mlp_equals_cpu(mode: simdev.Mode) -> None:
    cpu = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    model = copy.deepcopy(cpu).to("simdev")
    before = simdev.counts().synchronisations
    losses = train(model, "simdev")
    assert simdev.counts().synchronisations == before
    assert torch.equal(torch.stack(train(cpu, "cpu")), torch.stack(losses).cpu())
    for p, q in zip(cpu.parameters(), model.parameters()):
        assert torch.equal(p, q.cpu())

"""Train a model on the CPU and on the device, and compare the two bit for bit."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from simdev import device as simdev
from torch import Tensor, nn

STEPS = 4

MakeOptimizer = Callable[[nn.Module, str], torch.optim.Optimizer]
# Returns what surrounds the forward pass, for example offload_activations, for the name of a device.
Surround = Callable[[nn.Module, str], AbstractContextManager[Any]]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model whose weights are large enough for quantised optimizer state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.LayerNorm(192), nn.Linear(192, 64)).to(dtype)


def rows(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


def train(
    model: nn.Module,
    device: str,
    make_optimizer: MakeOptimizer,
    *,
    batches: list[Any],
    loss_of: Callable[[nn.Module, Any], Tensor] = mean_square,
    surround: Surround = lambda model, device: nullcontext(),
) -> tuple[Tensor, list[str]]:
    """Return the losses, and what the host waited for in the steps after the first one."""
    torch.manual_seed(1)
    optimizer = make_optimizer(model, device)
    around = surround(model, device)
    batches = [torch.utils._pytree.tree_map(lambda t: t.to(device), batch) for batch in batches]
    losses = []
    for step, batch in enumerate(batches):
        if step == 1:
            simdev.take_synchronisations()
        with around:
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), simdev.take_synchronisations()


class WatchedClock:
    """Stands in for the module ``time``. ``idle`` tells for each reading whether the device had no work left."""

    def __init__(self) -> None:
        self.idle: list[bool] = []

    def perf_counter(self) -> float:
        self.idle.append(torch.accelerator.current_stream().query())
        return time.perf_counter()


def busy() -> Tensor:
    """Give the device work that takes much longer than the host needs for a step."""
    x = torch.ones(1200, 1200, device="simdev")
    return x @ x


def compare(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    batches: list[Any] | None = None,
    device: str = "simdev",
    finish: Callable[[], object] = lambda: None,
    **how: Any,
) -> list[str]:
    """Train copies of a model on both devices; return what the host waited for on the device.

    Asserts that losses and parameters are equal, bit for bit. ``finish`` is called before parameters are compared.
    """
    if batches is None:
        batches = [rows(step, next(model.parameters()).dtype) for step in range(STEPS)]
    model, on_device = copy.deepcopy(model), copy.deepcopy(model).to(device)
    losses, waited = train(on_device, device, make_optimizer, batches=batches, **how)
    expected, _ = train(model, "cpu", make_optimizer, batches=batches, **how)
    finish()
    assert torch.equal(losses.cpu(), expected)
    for (name, p), q in zip(model.named_parameters(), on_device.parameters(), strict=True):
        assert not p.requires_grad or torch.equal(p, q.cpu()), name
    return waited

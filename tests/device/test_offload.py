"""Tests of tensors that leave the device and come back: activations, batches, and recomputed results."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import Tensor, nn

import shoestring
from shoestring.checkpoint import measure
from shoestring.data import Prefetcher
from training import STEPS, WatchedClock, busy, compare, mlp, rows


def deep(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def adamw(model: nn.Module, device: str) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer


def offloading(**options: Any) -> Callable[[nn.Module, str], AbstractContextManager[Any]]:
    def surround(model: nn.Module, device: str) -> AbstractContextManager[Any]:
        if device == "cpu":
            return nullcontext()
        return shoestring.offload_activations(exclude=model, device=device, min_bytes=0, **options)

    return surround


@pytest.mark.parametrize("pending", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_activations_equal_cpu(mode: simdev.Mode, prefetch: int, pending: int) -> None:
    compare(deep(), adamw, surround=offloading(prefetch=prefetch, max_pending=pending))


@pytest.mark.parametrize("host_bytes", [0, 40000])
def test_activations_on_disk_equal_cpu(mode: simdev.Mode, tmp_path: Path, host_bytes: int) -> None:
    compare(deep(), adamw, surround=offloading(folder=str(tmp_path), host_bytes=host_bytes))


@pytest.mark.parametrize(("compression", "error"), [("bf16", 2**-8), ("8bit", 0.00704)])
def test_compressed_activations(mode: simdev.Mode, compression: str, error: float) -> None:
    """Whether a tensor comes back from its copy or is still there depends on time, so bits differ.

    The documented error of a saved tensor bounds the relative change of each gradient; six layers add up.
    """
    model = deep()
    gradients = []
    for surround in (nullcontext(), offloading(compression=compression)(model, "simdev")):
        on_device = copy.deepcopy(model).to("simdev")
        if not isinstance(surround, nullcontext):
            surround.exclude(on_device)
        with surround:
            loss = on_device(rows(0).to("simdev")).square().mean()
        loss.backward()
        gradients.append([p.grad.cpu() for p in on_device.parameters()])
    for exact, found in zip(*gradients):
        assert (exact - found).norm() <= 12 * error * exact.norm()


def test_checkpoint_draws_equal_numbers(mode: simdev.Mode) -> None:
    model = deep()

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        def block(x: Tensor, layer: nn.Module) -> Tensor:
            return nn.functional.dropout(layer(x), 0.5)

        for layer in model:
            batch = shoestring.checkpoint(block, batch, layer)
        return batch.square().mean()

    waited = compare(model, adamw, loss_of=loss_of)
    assert waited == []


def test_checkpoint_draws_equal_seeds(mode: simdev.Mode) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        def block(x: Tensor, layer: nn.Module) -> Tensor:
            return shoestring.seeded_dropout(layer(x), 0.5)

        for layer in model:
            batch = shoestring.checkpoint(block, batch, layer)
        return batch.square().mean()

    waited = compare(deep(), adamw, loss_of=loss_of)
    assert waited == []


@pytest.mark.parametrize("fills_buffers", [False, True])
def test_prefetched_batches_equal_cpu(mode: simdev.Mode, fills_buffers: bool) -> None:
    def source(step: int, empty: Any = None) -> Tensor:
        if empty is None:
            return rows(step)
        x: Tensor = empty((16, 64), torch.float32)
        x.copy_(rows(step))
        return x

    model = mlp()
    on_device = copy.deepcopy(model).to("simdev")
    with Prefetcher(source, "simdev", depth=3, stop=3 * STEPS, fills_buffers=fills_buffers) as batches:
        losses, waited = train_on(on_device, batches)
    # The thread that reads batches waits for the steps whose memory it takes back. The training thread never waits.
    assert waited == ["an event is synchronised"] * (3 * STEPS - 3)
    expected, _ = train_on(model, (rows(step) for step in range(3 * STEPS)))
    assert torch.equal(losses.cpu(), expected)


def train_on(model: nn.Module, batches: Any) -> tuple[Tensor, list[str]]:
    optimizer = adamw(model, "")
    simdev.take_synchronisations()
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), simdev.take_synchronisations()


def test_everything_at_once(mode: simdev.Mode, tmp_path: Path) -> None:
    """State on the host, activations on the host and on disk, and steps within backward."""

    def make(model: nn.Module, device: str) -> torch.optim.Optimizer:
        place = {} if device == "cpu" else {"offload": "stream"}
        optimizer: torch.optim.Optimizer = shoestring.optim.AdamW(
            model.parameters(), lr=1e-3, step_in_backward=True, **place
        )
        return optimizer

    compare(deep(), make, surround=offloading(folder=str(tmp_path), host_bytes=100000))


def test_a_budget_is_kept(mode: simdev.Mode) -> None:
    """A plan knows the bytes of the device, and its choice keeps the budget."""
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    )
    model, x = blocks.to("simdev"), torch.randn(512, 64, device="simdev", requires_grad=True)

    def peak() -> int:
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        model(x).square().mean().backward()
        return int(torch.accelerator.max_memory_allocated() - before)

    weights = sum(p.nbytes for p in model.parameters())
    plain = peak()
    budget = plain // 2
    report = shoestring.checkpoint_model(
        model, [nn.Sequential], budget=budget, example=lambda: model(x).square().mean()
    )
    assert report.plan is not None and {choice for _, choice in report.blocks} != {"keep"}
    assert report.held_bytes is not None and report.held_bytes > 0
    assert peak() <= budget + weights  # gradients of weights are not part of the budget
    report.undo()


def test_a_plan_is_timed_when_the_device_is_idle(mode: simdev.Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WatchedClock()
    monkeypatch.setattr(measure, "time", clock)
    model, x = deep().to("simdev"), rows(0).to("simdev").requires_grad_()
    work = busy()
    shoestring.checkpoint_model(
        model, [nn.Sequential], budget=1 << 18, example=lambda: model(x).square().mean()
    ).undo()
    del work
    assert clock.idle and all(clock.idle)

"""Guard, averages and the gradient noise compute on the device what they compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import Tensor, nn

import shoestring
from shoestring.optim import AdamW, Averages, GradientNoise, Guard, Muon
from shoestring.runs import fast_defaults
from training import WatchedClock, busy, mlp, rows

Loop = Callable[[nn.Module, str], list[Tensor]]


def of_both(loop: Loop, roundings: int = 0) -> None:
    """Compare what a loop returns on the device and on the CPU, up to so many fp32 roundings of each number."""
    on_device, on_cpu = ([t.detach().cpu() for t in loop(mlp().to(name), name)] for name in ("simdev", "cpu"))
    for a, b in zip(on_device, on_cpu, strict=True):
        assert (a - b).abs().max() <= roundings * 2.0**-24 * b.abs().max()


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "AdamW":
        return [AdamW(model.parameters(), lr=1e-3)]
    if kind == "torch.AdamW":
        return [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=1e-3), AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)]


@pytest.mark.parametrize("on", ["skip", "rollback"])
@pytest.mark.parametrize("kind", ["AdamW", "torch.AdamW", "Muon and AdamW"])
def test_guard(mode: simdev.Mode, on: Any, kind: str) -> None:
    """The device skips a bad step. The host waits for the step before alone, and to take a copy."""

    def loop(model: nn.Module, device: str) -> list[Tensor]:
        guard = Guard(optimizers_of(model, kind), on=on, spike=8.0, every=3)
        for step in range(7):
            loss = model(rows(step).to(device)).square().mean()
            loss.backward()
            if step == 4:
                next(model.parameters()).grad[3, 5] = float("nan")  # type: ignore[index]
            simdev.take_synchronisations()
            guard.step(loss)
            waited = simdev.take_synchronisations()
            if step == 2 and device != "cpu" and kind != "torch.AdamW":
                assert all(reason.startswith("an event is synchronised") for reason in waited), waited
            model.zero_grad()
        guard.check()
        assert [(bad.step, bad.reason) for bad in guard.bad_steps] == [(4, "gradient")]
        assert guard.rollbacks == (on == "rollback")
        return list(model.parameters())

    of_both(loop)


def test_guard_with_a_gradient_scaler(mode: simdev.Mode) -> None:
    """The guard takes over the scaler's judgement, and reads it one step later as it does its own."""

    def loop(model: nn.Module, device: str) -> list[Tensor]:
        guard = Guard(optimizers_of(model, "AdamW"))
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        for step in range(5):
            loss = model(rows(step).to(device)).square().mean()
            guard.watch(loss * float("nan") if step == 2 else loss)
            scaler.scale(loss).backward()
            scaler.step(guard)  # type: ignore[arg-type]
            scaler.update()
            model.zero_grad()
        guard.check()
        assert guard.steps == 5
        assert [(bad.step, bad.reason) for bad in guard.bad_steps] == [(2, "loss")]
        return list(model.parameters())

    of_both(loop)


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("kind", ["ema", "lawa"])
def test_averages(mode: simdev.Mode, kind: Any, offload: Any) -> None:
    """``update`` does not wait for the device, unless the CPU has not finished the update before."""

    def loop(model: nn.Module, device: str) -> list[Tensor]:
        [optimizer] = optimizers_of(model, "AdamW")
        averages = Averages(
            model, kind, decay=0.5, offload=offload, **({"last": 2} if kind == "lawa" else {})
        )
        for step in range(5):
            model(rows(step).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            simdev.take_synchronisations()
            averages.update()
            if offload is None and step > 2 and device != "cpu":
                assert simdev.take_synchronisations() == []
        trained = [p.detach().clone() for p in model.parameters()]
        with averages.swap():
            swapped = [p.detach().clone() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(trained, model.parameters(), strict=True))
        return trained + swapped

    # The CPU moves an exponential average by one kernel, with 2 roundings in each of 4 updates. The device has
    # lerp_ of PyTorch instead, with 3.
    of_both(loop, roundings=4 * (2 + 3) if kind == "ema" and offload is None else 0)


def test_averages_wait_for_the_update_before(mode: simdev.Mode) -> None:
    """The CPU still averages the weights of one update when the next one is due."""

    def loop(model: nn.Module, device: str) -> list[Tensor]:
        averages = Averages(model, decay=0.5, offload="cpu")
        for step in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(step + 1)
            work = busy()
            averages.update()
        del work
        with averages.swap():
            return [p.detach().clone() for p in model.parameters()]

    of_both(loop)


def test_gradient_noise(mode: simdev.Mode) -> None:
    def loop(model: nn.Module, device: str) -> list[Tensor]:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        noise = GradientNoise(optimizer)
        for step in range(3):
            for part in range(3):
                loss = model(rows(3 * step + part).to(device)).square().mean() / 3
                if part < 2:
                    with optimizer.accumulate():
                        loss.backward()
                else:
                    loss.backward()
            noise.update(rows=16, micro_batches=3)
            optimizer.step()
            optimizer.zero_grad()
        return [torch.tensor([noise.noise, noise.square], dtype=torch.float64)]

    of_both(loop)


def test_switches_are_timed_when_the_device_is_idle(
    mode: simdev.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = WatchedClock()
    monkeypatch.setattr(fast_defaults, "time", clock)
    model = nn.Conv2d(3, 4, 3).to("simdev")  # the device has no convolutions, but their weights
    shoestring.fast_defaults(
        lambda: model.weight.square().sum(), model, switches=["channels_last"], repeats=2
    ).undo()
    assert clock.idle == [True] * (2 * 2 * 2 * 2)  # at both ends of each of 2 steps, with and without, twice

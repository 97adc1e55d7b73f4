"""Tests that ``GradientNoise`` measures known noise, over micro-batches and over processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import processes
from shoestring.optim import SGD, AdamW, GradientNoise, Muon, scale_lr


def quadratic(dimensions: int, seed: int) -> tuple[nn.Parameter, Callable[[int], Tensor], float, float]:
    """Return a weight, a loss of n random rows, and the true noise and square of the gradient.

    The gradient of a row x is ``weight - x``, whose covariance is that of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.linspace(0.5, 2.0, dimensions)
    weight = nn.Parameter(torch.full((dimensions,), 0.3))

    def loss(rows: int) -> Tensor:
        x = torch.randn(rows, dimensions, generator=generator) * deviations
        return 0.5 * (weight - x).square().sum(1).mean()

    return weight, loss, deviations.square().sum().item(), 0.09 * dimensions


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (4, 4), (16, 3)])
@pytest.mark.parametrize("place", [None, "cpu"])
def test_noise_of_a_quadratic(rows: int, count: int, place: str | None, seed: int) -> None:
    """The critical batch size of a known covariance is found within 10 %."""
    weight, loss, noise, square = quadratic(600, seed)
    optimizer = SGD([weight], lr=0.0, state_format="fp32", offload=place)
    measured = GradientNoise(optimizer, decay=0.99)
    for _ in range(300):
        for i in range(count):
            with optimizer.accumulate() if i + 1 < count else nullcontext():
                (loss(rows) / count).backward()
        measured.update(rows=rows, micro_batches=count)
        optimizer.step()
        optimizer.zero_grad()
    # 99 effective steps over 600 dimensions leave a relative deviation of about 1 % in both averages.
    assert measured.noise == pytest.approx(noise, rel=0.05)
    assert measured.square == pytest.approx(square, rel=0.08)
    assert measured.critical_batch == pytest.approx(noise / square, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_gradients(dtype: torch.dtype) -> None:
    """Two micro-batches give exactly the estimates of the formulas in fp64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3)).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    noise = GradientNoise(optimizer, decay=0.5)
    kept: list[list[Tensor]] = []
    for _ in range(2):
        gradients = []
        for i in range(3):
            x = torch.randn(4, 8, dtype=dtype)
            (model(x).float().square().mean() / 3).backward()
            gradients.append([p.grad.double() for p in model.parameters()])  # type: ignore[union-attr]
            model.zero_grad()
            with optimizer.accumulate() if i < 2 else nullcontext():
                (model(x).float().square().mean() / 3).backward()
        noise.update(rows=4, micro_batches=3)
        optimizer.zero_grad()
        optimizer._core.drop()
        small = sum((3 * g).square().sum() for one in gradients for g in one) / 3
        large = sum(sum(parts).square().sum() for parts in zip(*gradients, strict=True))  # type: ignore[arg-type, misc, attr-defined]
        kept.append([(small - large) / (1 / 4 - 1 / 12), (12 * large - 4 * small) / 8])
    # The second step counts twice as much as the first: 0.5 against 0.25.
    for found, index in ((noise.noise, 0), (noise.square, 1)):
        expected = (kept[0][index] + 2 * kept[1][index]) / 3
        # Sums of squares in fp32 are exact to about 1e-6, and their difference is a few times smaller.
        assert found == pytest.approx(float(expected), rel=1e-4 if dtype == torch.float32 else 2e-2)


def test_parameters_without_gradients_are_left_out() -> None:
    first, second, third = (nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = AdamW([first, second, third])
    noise = GradientNoise(optimizer)
    with optimizer.accumulate():
        (first.sum() / 2).backward()
    (second.sum() / 2).backward()
    noise.update(rows=1, micro_batches=2)
    # |g_b|^2 is 4, and |g_B|^2 is 1 + 1.
    assert noise.noise == pytest.approx((4 - 2) / 0.5)
    assert noise.square == pytest.approx((2 * 2 - 4) / 1)
    assert noise.critical_batch == math.inf


def test_state_continues(tmp_path: Path) -> None:
    def run(noise: GradientNoise, optimizer: AdamW, weight: nn.Parameter, steps: range) -> None:
        for step in steps:
            for i in range(2):
                with optimizer.accumulate() if i == 0 else nullcontext():
                    (weight * (step + i + 1) / 2).sum().backward()
            noise.update(rows=3, micro_batches=2)
            optimizer.step()
            optimizer.zero_grad()

    def make() -> tuple[GradientNoise, AdamW, nn.Parameter]:
        weight = nn.Parameter(torch.ones(5))
        optimizer = AdamW([weight])
        return GradientNoise(optimizer, decay=0.9), optimizer, weight

    whole = make()
    run(*whole, range(6))
    first, second = make(), make()
    run(*first, range(3))
    second[0].load_state_dict(first[0].state_dict())
    second[2].data.copy_(first[2])
    second[1].load_state_dict(first[1].state_dict())
    run(*second, range(3, 6))
    assert str(second[0].state_dict()) == str(whole[0].state_dict())
    state = whole[0].state_dict()
    for name, value in (("decay", 1.5), ("averages", torch.zeros(2))):
        with pytest.raises(ValueError, match=f"GradientNoise: {name}: expected"):
            whole[0].load_state_dict({**state, name: value})
    assert str(whole[0].state_dict()) == str(state)
    empty = GradientNoise(second[1])
    assert math.isnan(empty.critical_batch)
    empty.load_state_dict(GradientNoise(second[1]).state_dict())
    assert math.isnan(empty.noise)


def test_errors() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])
    with pytest.raises(ValueError, match=r"GradientNoise: decay: expected a number in \[0, 1\), received 1"):
        GradientNoise(optimizer, decay=1.0)
    with pytest.raises(ValueError, match="optimizer: expected one of shoestring.optim with accumulate"):
        GradientNoise(torch.optim.SGD([weight]))
    noise = GradientNoise(optimizer)
    weight.sum().backward()
    with pytest.raises(ValueError, match="micro_batches: expected at least 2"):
        noise.update(rows=4)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"micro-batches within accumulate\(\), received none"
    ):
        noise.update(rows=4, micro_batches=2)
    with optimizer.accumulate():
        weight.sum().backward()
    with pytest.raises(ValueError, match="rows: expected a number above 0, received 0"):
        noise.update(rows=0, micro_batches=2)


def test_a_step_without_update_leaves_nothing_behind() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Muon([nn.Parameter(torch.ones(3, 3))])
    optimizer = AdamW([weight])
    noise = GradientNoise(optimizer)
    for step in range(2):
        with optimizer.accumulate():
            (weight.sum() / 2).backward()
        (weight.sum() / 2).backward()
        if step == 1:
            noise.update(rows=1, micro_batches=2)
        optimizer.step()
        optimizer.zero_grad()
    assert noise.noise == pytest.approx(0, abs=1e-6)


def _ranks(rank: int) -> None:
    weight, loss, noise, square = quadratic(600, seed=rank)
    model = nn.Module()
    model.weight = weight
    model.forward = lambda rows: loss(rows)  # type: ignore[method-assign, assignment]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    measured = GradientNoise(optimizer, ddp=ddp)
    for _ in range(300):
        ddp(4).backward()
        measured.update(rows=4)
        optimizer.step()
        optimizer.zero_grad()
    assert measured.critical_batch == pytest.approx(noise / square, rel=0.1)
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, measured.critical_batch)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="gradients: expected a backward with all-reduce"):
        measured.update(rows=4)
    ddp(4).backward()
    with pytest.raises(ValueError, match="micro_batches: expected None with ddp"):
        measured.update(rows=4, micro_batches=2)


def test_processes_measure_together(tmp_path: Path) -> None:
    processes.run(2, tmp_path, _ranks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch": 256}, 2e-3),
        ({"batch": 16}, 5e-4),
        ({"batch": 256, "rule": "linear"}, 4e-3),
        ({"batch": 1024, "rule": "linear", "critical_batch": 128}, 2e-3),
        ({"batch": 1024, "critical_batch": 32}, 1e-3),
    ],
)
def test_scale_lr(options: dict[str, Any], expected: float) -> None:
    assert scale_lr(1e-3, base_batch=64, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "scale_lr: batch: expected a finite number above 0, received 0"),
        ({"batch": 4, "base_batch": -1}, "base_batch: expected a finite number above 0"),
        ({"batch": math.inf}, "batch: expected a finite number above 0, received inf"),
        ({"batch": 4, "rule": "cube"}, "rule: expected sqrt or linear, received cube"),
        ({"batch": 4, "critical_batch": 0}, "critical_batch: expected a finite number above 0"),
    ],
)
def test_scale_lr_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_lr(1e-3, **{"base_batch": 64, **options})

"""Schedules agree with those of torch.optim.lr_scheduler and transformers, step by step."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shoestring import optim
from shoestring.optim import schedules
from shoestring.optim.schedules import Schedule, Scheduler

N = 60


def sgd(groups: int = 1) -> torch.optim.SGD:
    params = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.3 / (i + 1)} for i in range(groups)]
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.1)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = N) -> list[float]:
    """Return the learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def torch_warmup(optimizer: Any, after: Callable[[Any], Any], warmup: int) -> Any:
    start = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
    return lr_scheduler.SequentialLR(optimizer, [start, after(optimizer)], [warmup])


PEERS: dict[str, tuple[Schedule, Callable[[Any], Any]]] = {
    "constant, warm-up": (
        schedules.constant(warmup=10),
        lambda o: lr_scheduler.LinearLR(o, 1 / 11, 1.0, 10),
    ),
    "constant, warm-up from a third": (
        schedules.constant(warmup=5, warmup_start=1 / 3),
        lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    ),
    "linear": (schedules.linear(N - 10, end=0.2), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, N - 10)),
    "cosine": (schedules.cosine(N, end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, N, eta_min=0.03)),
    "cosine, warm-up": (
        schedules.cosine(N, warmup=12),
        lambda o: torch_warmup(o, lambda p: lr_scheduler.CosineAnnealingLR(p, N - 12), 12),
    ),
    "cosine, restarts": (
        schedules.cosine(N, cycles=3, end=0.1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, N // 3, eta_min=0.03),
    ),
    "one cycle": (
        schedules.one_cycle(N, peak=0.3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, N, cycle_momentum=False),
    ),
    "one cycle, linear": (
        schedules.one_cycle(N, peak=0.3, rise=0.45, start=0.1, end=0.01, shape="linear"),
        lambda o: lr_scheduler.OneCycleLR(
            o,
            0.3,
            N,
            pct_start=0.45,
            anneal_strategy="linear",
            div_factor=10,
            final_div_factor=10,
            cycle_momentum=False,
        ),
    ),
    "polynomial": (
        schedules.polynomial(N - 5, power=1.7),
        lambda o: lr_scheduler.PolynomialLR(o, N - 5, 1.7),
    ),
    "transformers linear": (
        schedules.linear(N, warmup=7, warmup_start=0),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 7, N),
    ),
    "transformers cosine": (
        schedules.cosine(N, warmup=7, warmup_start=0),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 7, N),
    ),
    "transformers restarts": (
        schedules.cosine(N, warmup=6, warmup_start=0, cycles=4),
        lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 6, N, 4),
    ),
    "transformers inverse square root": (
        schedules.inverse_sqrt(warmup=9, warmup_start=0, timescale=20),
        lambda o: transformers.get_inverse_sqrt_schedule(o, 9, 20),
    ),
    "transformers polynomial": (
        schedules.polynomial(N, warmup=5, warmup_start=0, power=2, end=1e-7 / 0.3),
        lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 5, N, power=2.0),
    ),
    "transformers wsd": (
        schedules.wsd(N, warmup=8, warmup_start=0, decay=20 / (N - 8), shape="cosine"),
        lambda o: transformers.get_wsd_schedule(o, 8, 20, num_training_steps=N),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_agrees_with_peers(name: str) -> None:
    schedule, peer = PEERS[name]
    ours, theirs = sgd(), sgd()
    expected = rates(theirs, peer(theirs))
    # PyTorch multiplies the rate of the step before, so its roundings of fp64 add up.
    assert rates(ours, Scheduler(ours, lr=schedule)) == pytest.approx(expected, rel=N * 2**-50, abs=1e-15)


@pytest.mark.parametrize("momentum", [True, False])
def test_one_cycle_of_momentum(momentum: bool) -> None:
    def optimizer() -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(2))
        return torch.optim.SGD([weight], lr=0.1, momentum=0.9) if momentum else optim.AdamW([weight], lr=0.1)

    a, b = optimizer(), optimizer()
    cycle = schedules.one_cycle(N, peak=0.85, start=0.95 / 0.85, end=0.95 / 0.85)
    own = {"momentum" if momentum else "beta1": cycle}
    ours = Scheduler(a, lr=schedules.one_cycle(N, peak=0.3), **own)
    theirs = lr_scheduler.OneCycleLR(b, 0.3, N)
    for _ in range(N - 1):
        for key in ("lr", "momentum" if momentum else "betas"):
            assert a.param_groups[0][key] == pytest.approx(b.param_groups[0][key], rel=1e-12)
        for optimizer_, scheduler in ((a, ours), (b, theirs)):
            optimizer_.step()
            scheduler.step()


def test_values_by_hand() -> None:
    steps = [0, 1, 4, 13, 14, 15, 19, 20, 1000]
    wsd = schedules.wsd(20, warmup=4, decay=0.5, end=0.1, shape="sqrt", peak=2.0)
    decay = [2 * (0.1 + 0.9 * (1 - math.sqrt(x))) for x in (1 / 8, 2 / 8, 3 / 8, 7 / 8, 1, 1)]
    assert [wsd(step) for step in steps] == pytest.approx([0.4, 0.8, 2.0, *decay])
    flat = schedules.flat_cos(20, flat=0.5)
    assert [flat(step) for step in (0, 10, 15, 20, 21)] == pytest.approx([1, 1, 0.5, 0, 0])
    linear = schedules.wsd(10, decay=1.0)
    assert [linear(step) for step in range(11)] == pytest.approx([1 - step / 10 for step in range(11)])
    assert schedules.inverse_sqrt()(30_000) == 0.5
    assert schedules.one_cycle(1)(0) == pytest.approx(4e-6) and schedules.one_cycle(2, rise=1.0)(1) == 1
    assert schedules.linear(5, warmup=5)(5) == 0 and schedules.flat_cos(10, flat=1)(9) == 1


def test_whole_numbers() -> None:
    batch = schedules.linear(64, peak=512, end=64 / 512)
    assert [batch.whole(step, 64) for step in (0, 1, 32, 63, 64, 99)] == [512, 448, 256, 64, 64, 64]
    # 0.1 * 30 is below 3 in exact arithmetic of the factors, yet every third is whole.
    assert [schedules.constant(peak=n, warmup=9, warmup_start=0.1).whole(0) for n in (10, 30, 70)] == [
        1,
        3,
        7,
    ]
    assert schedules.constant(peak=0.5).whole(0, 8) == 8
    with pytest.raises(
        ValueError, match="Schedule: multiple_of: expected a number of at least 1, received 0"
    ):
        batch.whole(0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.linear(0), "linear: steps: expected a number of at least 1, received 0"),
        (
            lambda: schedules.cosine(10, warmup=11),
            "cosine: warmup: expected at most the 10 steps, received 11",
        ),
        (
            lambda: schedules.cosine(10, warmup=-1),
            "cosine: warmup: expected a number of at least 0, received -1",
        ),
        (lambda: schedules.wsd(10, decay=0), r"wsd: decay: expected a number in \(0, 1\], received 0"),
        (lambda: schedules.wsd(10, shape="x"), "wsd: shape: expected linear or cosine or sqrt, received x"),
        (
            lambda: schedules.one_cycle(10, rise=1.5),
            r"one_cycle: rise: expected a number in \[0, 1\], received 1.5",
        ),
        (lambda: schedules.linear(10, end=-1), "linear: end: expected a number of at least 0, received -1"),
        (lambda: schedules.linear(10, peak=math.inf), "linear: peak: expected a finite number, received inf"),
        (lambda: schedules.cosine(10, cycles=0), "cosine: cycles: expected a number from 1 to 1,000,000"),
        (
            lambda: schedules.inverse_sqrt(timescale=0),
            "timescale: expected a number of at least 1, received 0",
        ),
        (lambda: schedules.linear(2.5), "linear: steps: expected a whole number, received 2.5"),  # type: ignore[arg-type]
        (
            lambda: Schedule("linear"),
            "linear: steps: expected the number of steps of the training, received none",
        ),
        (
            lambda: Schedule("constant", steps=3),
            "constant: steps: expected no value, since this schedule does not",
        ),
        (lambda: Schedule("linear", steps=3, power=2), "linear: power: expected no value"),
        (
            lambda: Schedule("step"),
            "schedules: name: expected one of constant, cosine, flat_cos, .*, received step",
        ),
        (lambda: schedules.constant()(-1), "Schedule: step: expected a number of at least 0, received -1"),
    ],
)
def test_bad_input(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_groups_functions_and_state() -> None:
    optimizer = sgd(2)
    scheduler = Scheduler(
        optimizer,
        lr=[schedules.linear(10), lambda step: 2.0**-step],
        weight_decay=schedules.constant(peak=0.5),
        momentum=schedules.linear(10, end=0.5),
    )
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == pytest.approx((0.3 * 0.6, 0.15 / 16))
    assert first["weight_decay"] == 0.5 and second["momentum"] == pytest.approx(0.9 * 0.8)
    state = scheduler.state_dict()
    assert state == {
        "step": 4, "first.lr": [0.3, 0.15], "first.weight_decay": [0.1, 0.1], "first.momentum": [0.9, 0.9],
    }  # fmt: skip
    # An optimizer whose rate has been changed already, as after loading its state, gets the same values.
    resumed = sgd(2)
    resumed.load_state_dict(optimizer.state_dict())
    again = Scheduler(
        resumed,
        lr=[schedules.linear(10), lambda step: 2.0**-step],
        weight_decay=schedules.constant(peak=0.5),
        momentum=schedules.linear(10, end=0.5),
    )
    again.load_state_dict(state)
    scheduler.step()
    again.step()
    values = [
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in (optimizer, resumed)
    ]
    assert values[0] == values[1] and again.get_last_lr() == scheduler.get_last_lr()
    again.step(0)
    assert resumed.param_groups[0]["lr"] == 0.3


def test_scheduler_refuses() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.ones(2))], lr=1e-2)
    with pytest.raises(
        ValueError, match=r"Scheduler: rate: expected one of lr, .*beta2, received another option"
    ):
        Scheduler(optimizer, rate=schedules.constant())
    with pytest.raises(
        ValueError, match="Scheduler: lr: expected one schedule, or one for each of the 1 groups"
    ):
        Scheduler(optimizer, lr=[schedules.constant()] * 2)
    scheduler = Scheduler(
        optimizer,
        lr=lambda step: 1.0 / (step + 1),
        beta2=schedules.constant(peak=1.5, warmup=4, warmup_start=0.5),
    )
    for _ in range(1):
        scheduler.step()
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=r"AdamW: betas: expected two numbers in \[0, 1\)"):
        scheduler.step(3)
    assert optimizer.param_groups[0] == before and scheduler.last_epoch == 1
    with pytest.raises(ValueError, match="Scheduler: lr: expected a finite value of step 0, received nan"):
        Scheduler(optimizer, lr=lambda step: math.nan)
    with pytest.raises(
        ValueError, match="load_state_dict: expected .*'first.beta2', 'first.lr', 'step'.* another state"
    ):
        scheduler.load_state_dict({"step": 3, "first.lr": [0.1]})
    assert optimizer.param_groups[0] == before


def test_tensor_rates_copies_and_pickles() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([weight], lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    scheduler = Scheduler(optimizer, lr=schedules.linear(10))
    scheduler.step()
    assert held is optimizer.param_groups[0]["lr"] and held.item() == pytest.approx(0.45)
    schedule = schedules.wsd(100, warmup=3)
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert [other(s) for s in range(100)] == [schedule(s) for s in range(100)] and repr(other) == repr(
            schedule
        )


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_plateau_agrees_with_torch(mode: Any, threshold_mode: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = dict(
        mode=mode,
        threshold_mode=threshold_mode,
        factor=0.5,
        patience=2,
        threshold=0.05,
        cooldown=3,
        min_lr=0.01,
    )
    a, b = sgd(), sgd()
    ours, theirs = schedules.ReduceOnPlateau(a, **options), lr_scheduler.ReduceLROnPlateau(b, **options)
    for step in range(200):
        metric = torch.rand((), generator=draw).item() + 1 / (step + 1)
        ours.step(metric)
        theirs.step(metric)
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
        state = ours.state_dict()
        assert state == {key: getattr(theirs, key) for key in state}
        if step == 100:
            ours = schedules.ReduceOnPlateau(a, **options)
            ours.load_state_dict(state)


def test_plateau_refuses_nan() -> None:
    plateau = schedules.ReduceOnPlateau(sgd())
    before = plateau.state_dict()
    with pytest.raises(ValueError, match="ReduceOnPlateau: metric: expected a number, received nan"):
        plateau.step(float("nan"))
    with pytest.raises(ValueError, match="load_state_dict: expected best, num_bad_epochs, cooldown_counter"):
        plateau.load_state_dict({"best": 1.0})
    assert plateau.state_dict() == before


def test_scheduler_in_a_trainer_of_pytorch() -> None:
    """It is a scheduler of PyTorch."""
    model = nn.Linear(4, 1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: lr_scheduler.LRScheduler = Scheduler(optimizer, lr=schedules.linear(4))
    seen: list[Tensor] = []
    for _ in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen.append(loss.detach())
    assert optimizer.param_groups[0]["lr"] == 0 and scheduler.get_last_lr() == [0]


def test_groups_that_share_a_tensor_have_rates_of_their_own() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = optim.AdamW([{"params": [p]} for p in parameters], lr=torch.tensor(1e-2))
    scheduler = schedules.Scheduler(optimizer, lr=[schedules.constant(), schedules.linear(10)])
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01, 0.005])


def test_a_group_that_was_added_later_is_refused() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.ones(4))], lr=1e-2)
    scheduler = schedules.Scheduler(optimizer, lr=schedules.linear(10))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    with pytest.raises(ValueError, match="expected the 1 groups for which it was made, received 2"):
        scheduler.step()

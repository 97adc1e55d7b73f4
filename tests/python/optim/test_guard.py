"""Tests that ``Guard`` skips bad steps, stops at them, and restores what was before them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import processes
import shoestring
from shoestring.optim import SAM, AdamW, BadStep, GaLore, Guard, Muon

NAN, INF = math.nan, math.inf
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.01),
    "AdamW, clipped": lambda ps: AdamW(ps, lr=0.01, max_grad_norm=0.1),
    "AdamW on the host": lambda ps: AdamW(ps, lr=0.01, offload="cpu"),
    "Muon": lambda ps: Muon([p for p in ps if p.ndim == 2], lr=0.01),
    "GaLore": lambda ps: GaLore(ps, AdamW, lr=0.01, rank=2),
    "torch.SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "torch.AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5))


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: list[int],
    take: Callable[[Tensor], None],
    spoil: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        spoil(step, model)
        take(loss)


def spoiler(bad: dict[int, float]) -> Callable[[int, nn.Module], None]:
    """Return a function that puts a number into the gradient of the last layer in these steps."""

    def spoil(step: int, model: nn.Module) -> None:
        if step in bad:
            grad = list(model.parameters())[-2].grad
            assert grad is not None
            grad[1, 2] = bad[step]

    return spoil


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_leaves_no_trace(name: str) -> None:
    """Weights are those of a run without the bad steps, bit for bit."""
    models = net(), net()
    first, second = (OPTIMIZERS[name](list(model.parameters())) for model in models)
    guard = Guard(first)
    train(models[0], first, [0, 1, 2, 3, 4, 5], guard.step, spoiler({1: NAN, 3: INF, 4: -INF}))
    # The guard says in the next step what has happened in this one.
    assert [bad.step for bad in guard.bad_steps] == [1, 3, 4]
    assert all(bad.reason == "gradient" and math.isfinite(bad.loss) for bad in guard.bad_steps)
    models[1].load_state_dict(net().state_dict())
    for step in [0, 1, 2, 3, 4, 5]:  # the statistics of BatchNorm see every batch
        second.zero_grad()
        models[1](batch(step)).square().mean().backward()
        if step not in (1, 3, 4):
            second.step()
    assert_equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("name", ["AdamW", "torch.SGD", "torch.AdamW, fused"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_loss_is_noticed_although_gradients_are_finite(name: str, value: float) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    guard = Guard(optimizer)
    model(batch(0)).square().mean().backward()
    before = weights(model)
    guard.step(torch.tensor(value))
    assert_equal(weights(model), before)
    assert guard.bad_steps == []
    guard.check()
    assert guard.bad_steps[0][:2] == (0, "loss")
    assert guard.bad_steps[0].loss == value or math.isnan(value)
    guard.step(torch.tensor(1.0))
    assert not torch.equal(weights(model)[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_gradients_are_good(dtype: torch.dtype) -> None:
    """The sum of their squares overflows, and none is infinite."""
    largest = torch.finfo(dtype).max
    weight = nn.Parameter(torch.zeros(3, 1000, dtype=dtype))
    guard = Guard(AdamW([weight], lr=1.0))
    for value in (largest, -largest):
        weight.grad = torch.full_like(weight, value)
        guard.step()
    guard.check()
    assert guard.bad_steps == []
    empty = nn.Parameter(torch.zeros(0, 4, dtype=dtype))
    empty.grad = torch.zeros_like(empty)
    guard = Guard(AdamW([empty, weight], lr=1.0))
    weight.grad = torch.full((1000, 3), 1.0, dtype=dtype).t()
    guard.step()
    weight.grad = torch.full((1000, 3), NAN, dtype=dtype).t()
    guard.step()
    guard.check()
    assert [bad.step for bad in guard.bad_steps] == [1]
    assert math.isnan(guard.bad_steps[0].loss)


def judged(losses: list[float], spike: float, window: int) -> list[int]:
    """Return the numbers of the spikes, in fp64."""
    count, mean, variance = 0, 0.0, 0.0
    spikes = []
    for step, loss in enumerate(losses):
        deviation = max(math.sqrt(variance), 0.01 * abs(mean))
        if not math.isfinite(loss) or (count >= window and loss > mean + spike * deviation):
            spikes.append(step)
            continue
        count += 1
        weight = 1 / min(count, window)
        difference = loss - mean
        mean += weight * difference
        variance = (1 - weight) * (variance + weight * difference**2)
    return spikes


@pytest.mark.parametrize("spike", [2.0, 4.0])
@pytest.mark.parametrize("window", [2, 5, 30])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e8])
def test_spikes_are_those_of_fp64(spike: float, window: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    losses = scale * (2 + torch.linspace(2, 0, 200, dtype=torch.float64) + 0.1 * noise)
    losses[40::25] *= 3
    losses[100] = NAN
    losses = losses.float()
    weight = nn.Parameter(torch.zeros(2))
    guard = Guard(torch.optim.SGD([weight], lr=0.0), spike=spike, window=window, limit=100)
    for loss in losses:
        guard.step(loss)
    guard.check()
    expected = judged(losses.tolist(), spike, window)
    assert [bad.step for bad in guard.bad_steps] == expected
    assert {65, 90, 100, 115} <= set(expected)
    assert all(bad.reason == ("loss" if bad.step == 100 else "spike") for bad in guard.bad_steps)
    assert guard.steps == 200


def test_equal_losses_have_no_spikes() -> None:
    """The deviation is at least 1 % of the mean."""
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), spike=5.0, window=10)
    for loss in [2.0] * 20 + [2.11, 2.0, 2.09]:
        guard.step(torch.tensor(loss))
    guard.check()
    assert [(bad.step, bad.reason) for bad in guard.bad_steps] == [(20, "spike")]


def test_stop_raises_one_step_late_with_good_weights() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    guard = Guard(optimizer, on="stop")
    train(model, optimizer, [0, 1], guard.step)
    good = weights(model)
    train(model, optimizer, [2], guard.step, spoiler({2: NAN}))
    message = r"^Guard: step 2: expected finite gradients, received NaN or infinity among them"
    with pytest.raises(RuntimeError, match=message):
        train(model, optimizer, [3], guard.step)
    assert_equal(weights(model), good)
    train(model, optimizer, [4], guard.step)  # the caller may go on
    assert not torch.equal(weights(model)[0], good[0])


def test_check_raises_at_the_end() -> None:
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), on="stop")
    guard.step(torch.tensor(INF))
    with pytest.raises(RuntimeError, match="expected a finite loss, received inf"):
        guard.check()
    guard.check()


def test_a_message_explains_a_spike() -> None:
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), on="stop", spike=3.0, window=2)
    for loss in (1.0, 3.0, 9.0):
        guard.step(torch.tensor(loss))
    message = r"step 2: expected a loss of at most 5 \(mean 2 \+ spike 3 x deviation 1\), received 9\."
    with pytest.raises(RuntimeError, match=message):
        guard.check()


def test_too_many_skipped_steps_raise() -> None:
    weight = nn.Parameter(torch.zeros(1))
    guard = Guard(torch.optim.SGD([weight]), limit=3)
    for loss in [NAN, NAN, 1.0, NAN, NAN, NAN]:
        guard.step(torch.tensor(loss))
    with pytest.raises(RuntimeError, match=r"step 5: .* This was bad step 3 in a row"):
        guard.step(torch.tensor(1.0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rollback_restores_weights_state_and_buffers(name: str) -> None:
    """After a bad step, training goes on bit for bit as from the copy."""

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, take: Callable[[Tensor], None], number: int
    ) -> None:
        optimizer.zero_grad()
        loss = model(batch(number)).square().mean()
        loss.backward()
        spoiler({5: NAN})(number, model)
        take(loss)

    model, reference = net(), net()
    optimizer, plain = (OPTIMIZERS[name](list(m.parameters())) for m in (model, reference))
    guard = Guard(optimizer, on="rollback", every=3, model=model)
    for number in range(4):
        # The copies are taken before the steps 0 and 3.
        step(model, optimizer, guard.step, number)
        if number < 3:
            step(reference, plain, lambda loss: plain.step(), number)
    reference(batch(3))  # the statistics of BatchNorm are those at the copy, after the forward of step 3
    for number in (4, 5, 6):
        step(model, optimizer, guard.step, number)
    assert guard.rollbacks == 1
    assert [bad.step for bad in guard.bad_steps] == [5]
    tensors = [*weights(model), *(b.clone() for b in model.buffers())]
    assert_equal(tensors, [*weights(reference), *reference.buffers()])
    for number in (7, 8):
        step(model, optimizer, guard.step, number)
        step(reference, plain, lambda loss: plain.step(), number)
    assert_equal(weights(model), weights(reference))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_several_optimizers_share_a_guard(is_scaled: bool) -> None:
    """None of them steps if a gradient of one is bad, and all are restored."""

    def split(model: nn.Module) -> list[torch.optim.Optimizer]:
        others = [p for p in model.parameters() if p.ndim != 2]
        return [
            Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
            AdamW(others[:2], lr=0.01),
            torch.optim.SGD(others[2:], lr=0.01, momentum=0.9),
        ]

    model, reference = net(), net()
    optimizers, plain = split(model), split(reference)
    guard = Guard(optimizers, on="rollback", every=2, model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=is_scaled)

    def backward(number: int, net: nn.Module = model) -> Tensor:
        net.zero_grad()
        loss = net(batch(number)).square().mean()
        if net is model:
            guard.watch(loss)
            scaler.scale(loss).backward()
        else:
            loss.backward()
        return loss

    def take() -> None:
        if is_scaled:
            scaler.step(guard)
            scaler.update()
        else:
            guard.step()

    for number in (0, 1):
        backward(number)
        take()
        backward(number, reference)
        for optimizer in plain:
            optimizer.step()
    reference(batch(2))  # the statistics of BatchNorm are those at the copy
    backward(2)  # the copy is taken before this step
    take()
    before = weights(model)
    if is_scaled:
        # The scaler has an opinion on gradients, so a loss is bad.
        guard.watch(torch.tensor(NAN))
    backward(3)
    if not is_scaled:
        bias = optimizers[1].param_groups[0]["params"][0]
        bias.grad[1] = NAN
    take()
    assert_equal(weights(model), before)
    guard.check()
    assert guard.rollbacks == 1 and [bad.step for bad in guard.bad_steps] == [3]
    assert_equal(weights(model), weights(reference))
    assert_equal(list(model.buffers()), list(reference.buffers()))


def test_rollback_gives_up() -> None:
    """The same copy is restored a number of times, and then a step raises."""
    weight = nn.Parameter(torch.zeros(1))
    guard = Guard(torch.optim.SGD([weight]), on="rollback", limit=2)
    for loss in [1.0, NAN, 1.0, NAN, 1.0, NAN]:
        guard.step(torch.tensor(loss))
    assert guard.rollbacks == 2
    with pytest.raises(RuntimeError, match=r"The copy of step 0 has been restored 2 times"):
        guard.step(torch.tensor(1.0))


def test_a_first_step_that_is_bad_is_skipped() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    guard = Guard(optimizer, on="rollback", model=model)
    before = weights(model)
    train(model, optimizer, [0], guard.step, spoiler({0: NAN}))
    assert_equal(weights(model), before)
    train(model, optimizer, [1], guard.step)
    assert not torch.equal(weights(model)[0], before[0])


@pytest.mark.parametrize("where", ["sum", "last"])
def test_micro_batches_are_judged_together(where: str) -> None:
    """A bad gradient in a sum of ``accumulate()`` counts, and losses are averaged."""
    models = net(), net()
    optimizers = [AdamW(model.parameters(), lr=0.01) for model in models]
    guard = Guard(optimizers[0], spike=3.0, window=2)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with optimizer.accumulate():
                loss = model(batch(2 * step)).square().mean()
                if step == 2 and model is models[0] and where == "sum":
                    loss = loss * NAN
                loss.backward()
            if model is models[0]:
                guard.watch(torch.tensor(1.0))
            loss = model(batch(2 * step + 1)).square().mean()
            loss.backward()
            if model is models[0]:
                if where == "last":
                    spoiler({2: NAN})(step, model)
                guard.step(torch.tensor(3.0 if step < 3 else 4.0))  # a mean of 2.5 is a spike
            elif step < 2:
                optimizer.step()
            else:
                optimizer._core.drop()  # the sums
                optimizer.zero_grad()
    guard.check()
    assert [(bad.step, bad.reason, bad.loss) for bad in guard.bad_steps] == [
        (2, "gradient", 2.0),
        (3, "spike", 2.5),
    ]
    assert_equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("name", ["AdamW", "torch.SGD", "torch.AdamW, fused", "SAM"])
def test_a_gradient_scaler_steps_the_guard(name: str) -> None:
    """Scaled gradients that overflow are the scaler's business; a bad loss is the guard's."""
    models = net(), net()
    optimizers: list[torch.optim.Optimizer] = []
    for model in models:
        made = (
            SAM(model.parameters(), AdamW, lr=0.01)
            if name == "SAM"
            else OPTIMIZERS[name](list(model.parameters()))
        )
        optimizers.append(made)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**126) for _ in models]
    guard = Guard(optimizers[0])
    for step in range(60):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean() * 64
            if model is models[0]:
                guard.watch(loss * NAN if step == 20 else loss)
            scaler.scale(loss).backward()
            if isinstance(optimizer, SAM):
                optimizer.first_step(zero_grad=True)
                loss = model(batch(step)).square().mean() * 64
                scaler.scale(loss).backward()
            if model is models[0]:
                scaler.step(guard)  # type: ignore[arg-type]
            elif step != 20:
                scaler.step(optimizer)
            else:
                if isinstance(optimizer, SAM):
                    optimizer._go_back()
                scaler.unscale_(optimizer)
            scaler.update()
    guard.check()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**126
    assert [(bad.step, bad.reason) for bad in guard.bad_steps] == [(20, "loss")]
    assert_equal(weights(models[0]), weights(models[1]))


def test_state_continues_a_run(tmp_path: Path) -> None:
    """Resumed from a file, the guard finds the spikes of a run without interruption."""
    losses = [1.0, 1.2, 0.9, 1.1, 9.0, 1.0, NAN, 1.05, 0.95, 3.0, 1.0]

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Guard]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        return model, optimizer, Guard(optimizer, spike=4.0, window=3)

    whole = make()[2]
    for loss in losses:
        whole.step(torch.tensor(loss))
    model, optimizer, guard = make()
    for loss in losses[:7]:
        guard.step(torch.tensor(loss))
    shoestring.save_training(tmp_path / "run", model, optimizer, step=7, guard=guard)
    model, optimizer, resumed = make()
    shoestring.load_training(tmp_path / "run", model, optimizer, guard=resumed)
    for loss in losses[7:]:
        resumed.step(torch.tensor(loss))
    assert str(resumed.state_dict()) == str(whole.state_dict())
    assert [bad.step for bad in resumed.bad_steps] == [4, 6, 9]
    assert math.isnan(resumed.bad_steps[1].loss)


def test_saving_does_not_hide_a_bad_step() -> None:
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), on="stop")
    guard.step(torch.tensor(NAN))
    assert guard.state_dict()["bad_steps"].tolist() == [0]
    with pytest.raises(RuntimeError, match="step 0"):
        guard.step(torch.tensor(1.0))


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    for loss in [1.0, NAN]:
        guard.step(torch.tensor(loss))
    state = guard.state_dict()
    for name, value, message in [
        ("steps", -1, "steps: expected a whole number of at least 0, received -1"),
        ("in_a_row", 0.5, "in_a_row: expected a whole number of at least 0, received 0.5"),
        ("statistics", torch.zeros(2), "statistics: expected 3 numbers, received"),
        ("bad_losses", torch.zeros(3), "bad_losses: expected 1 numbers, received"),
        ("bad_reasons", torch.tensor([7]), "bad_reasons: expected numbers from 0 to 2, received 7"),
    ]:
        with pytest.raises(ValueError, match=message):
            guard.load_state_dict({**state, name: value})
    broken = dict(state)
    del broken["statistics"]
    with pytest.raises(ValueError, match="statistics: expected 3 numbers, received none"):
        guard.load_state_dict(broken)
    assert str(guard.state_dict()) == str(state)
    assert isinstance(guard.bad_steps[0], BadStep)
    assert guard.bad_steps[0][:2] == (1, "loss")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "rollbck"}, "on: expected skip, stop or rollback, received rollbck"),
        ({"spike": 0.0}, "spike: expected none or a finite number above 0, received 0"),
        ({"spike": NAN}, "spike: expected none or a finite number above 0, received nan"),
        ({"window": 1}, "window: expected a number from 2"),
        ({"every": 0}, "every: expected a number of at least 1, received 0"),
        ({"limit": 0}, "limit: expected none or a number of at least 1, received 0"),
        ({"on": "stop", "limit": 3}, "limit: expected none with on="),
        ({"model": nn.Linear(1, 1)}, 'model: expected None with on="skip"'),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), **options)


def test_wrong_losses_and_optimizers_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2))
    guard = Guard(torch.optim.SGD([weight]), spike=3.0)
    with pytest.raises(
        ValueError, match=r"^Guard: loss: expected a floating-point tensor with one element, received"
    ):
        guard.step(torch.zeros(2))
    with pytest.raises(ValueError, match="loss: expected a floating-point tensor with one element"):
        guard.step(torch.tensor(1))
    with pytest.raises(ValueError, match="loss: expected a loss to look for spikes, received none"):
        guard.step()
    with pytest.raises(ValueError, match='on: expected "skip" or "stop" with SAM'):
        Guard(SAM([weight], AdamW, lr=0.1), on="rollback")
    guard = Guard(AdamW([weight], step_in_backward=True))
    with pytest.raises(ValueError, match="optimizers: expected step_in_backward=False"):
        guard.step(torch.tensor(1.0))
    with pytest.raises(ValueError, match="^Guard: optimizers: expected at least one, received none"):
        Guard([])
    own = nn.Parameter(torch.zeros(2))
    optimizers = AdamW([own]), AdamW([nn.Parameter(torch.zeros(2))])
    with optimizers[0].accumulate():
        own.sum().backward()
    with pytest.raises(ValueError, match=r"optimizers: expected gradients in \.grad, because several"):
        Guard(optimizers).step(torch.tensor(1.0))


def test_a_guard_does_not_keep_the_loss() -> None:
    """A program may change its loss in place after the call."""
    guard = Guard(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    loss = torch.tensor(1.0)
    guard.watch(loss)
    loss.fill_(NAN)
    guard.step()
    guard.check()
    assert guard.bad_steps == []


def _ranks(rank: int) -> None:
    """One process has a bad loss, then another has bad gradients. Both processes skip both steps."""
    model = processes.model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    guard = Guard(optimizer, spike=3.0, window=2)
    taken = []
    losses = [(1.0, 3.0), (3.0, 5.0), (NAN, 1.0), (3.0, 3.0), (1.0, 9.0), (2.0, 6.0)]
    for step, pair in enumerate(losses):
        optimizer.zero_grad()
        model(processes.batch(step)).square().mean().backward()
        if step == 3 and rank == 1:
            next(model.parameters()).grad[0, 0] = INF  # type: ignore[index]
        before = weights(model)
        guard.step(torch.tensor(pair[rank]))
        taken.append(not torch.equal(weights(model)[0], before[0]))
    guard.check()
    # The means are 2, 4, NaN, 3, 5, 4; the third good one may be up to 3 + 3 * 1.
    assert taken == [True, True, False, False, True, True]
    assert [(bad.step, bad.reason) for bad in guard.bad_steps] == [(2, "loss"), (3, "gradient")]
    together: list[Any] = [None, None]
    dist.all_gather_object(together, weights(model))
    assert_equal(*together)


def test_processes_agree(tmp_path: Path) -> None:
    processes.run(2, tmp_path, _ranks)


def _shards(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(processes.model())
    optimizer = AdamW(model.parameters(), lr=0.01)
    guard = Guard(optimizer, on="rollback", every=2)
    states = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(processes.batch(step)).square().mean()
        loss.backward()
        if step == 3 and rank == 0:
            next(model.parameters()).grad.to_local()[0] = NAN  # type: ignore[union-attr]
        states.append([processes.whole(p).clone() for p in model.parameters()])
        guard.step(loss)
    after = [processes.whole(p) for p in model.parameters()]
    assert guard.rollbacks == 1
    assert_equal(after, states[2])
    assert not torch.equal(states[2][0], states[3][0])


def test_shards_roll_back_together(tmp_path: Path) -> None:
    processes.run(2, tmp_path, _shards)


def test_a_copied_guard_is_refused_nothing() -> None:
    """The optimizer itself can be copied while a guard watches it."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = Guard(optimizer)
    weight.grad = torch.ones(2)
    guard.step()
    assert copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] == 0.1

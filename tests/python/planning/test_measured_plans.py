"""Test that the best plans are run before one is taken: which ones, the choice among them, and what they leave behind."""

import random
import re
from typing import Any

import pytest
import torch
from situations import plan, random_situation
from test_plan_training import BATCH, Model, example_of
from torch import Tensor, nn

import shoestring
from shoestring.planning import candidates, situation, training_plan, trial
from shoestring.planning.trial import Measured, Trial


class Runs:
    """Stands for run_trials: each plan takes so many seconds and bytes."""

    def __init__(self, *results: tuple[float, int]) -> None:
        self.results, self.plans = list(results), []  # type: ignore[var-annotated]

    def __call__(self, plans: Any, *_: Any) -> list[Measured]:
        self.plans.append(list(plans))
        return [
            Measured(one, [Trial(seconds, 0, one.peak_bytes + excess)])
            for one, (seconds, excess) in zip(plans, self.results)
        ]


def planned(monkeypatch: pytest.MonkeyPatch, runs: Any, **options: Any) -> shoestring.TrainingPlan:
    monkeypatch.setattr(training_plan, "run_trials", runs)
    torch.manual_seed(0)
    model = Model()
    return shoestring.plan_training(model, example=example_of(model), batch_size=BATCH, **options)


def way(plan: shoestring.TrainingPlan) -> Any:
    treatments = [block["treatment"] for block in plan.checkpoints]
    return plan.micro_batch, plan.precision, str(plan.optimizer), treatments


@pytest.mark.parametrize("chosen", range(3))
def test_the_fastest_as_measured_is_returned(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(*((1.0 if i == chosen else 2.0 + i, 0) for i in range(3)))
    plan = planned(monkeypatch, runs, freedom="rounding")
    [tried] = runs.plans
    assert len(tried) in (2, 3)
    if chosen == len(tried):
        return
    assert way(plan) == way(tried[chosen]) and plan.seconds == 1.0
    assert len({str(way(one)) for one in tried}) == len(tried)
    best = min(tried, key=lambda one: float(one.seconds))  # as predicted
    assert plan.frontier == best.frontier and plan.alternatives == best.alternatives
    assert re.match("measured: 1 s; (plain|the predicted best) ", plan.reasons[-1]["text"])
    # Without a budget, all plans fit.
    assert not any(re.search("as given|no plan fits", reason["text"]) for reason in plan.reasons)


def test_a_plan_that_needs_more_than_the_budget_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first plan is the fastest, and its process takes more than the budget.
    runs = Runs((1.0, 1 << 40), (2.0, 0), (3.0, 1 << 40))
    plan = planned(monkeypatch, runs, device_memory="100GiB")
    assert plan.seconds == 2.0 and way(plan) == way(runs.plans[0][1])
    assert re.search(r"(plain|the predicted best) 1 s and \d{13} bytes", plan.reasons[-1]["text"])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((1.0, 1.0, 1.0), 0), ((1.0, 0.99, 0.985), 0), ((1.0, 0.97, 0.96), 1), ((1.0, 0.97, 0.9), 2)],
)
def test_noise_does_not_choose(seconds: tuple[float, ...], chosen: int) -> None:
    """The plainest plan is the first."""
    any_plan = shoestring.TrainingPlan(plan(random_situation(random.Random(0))))
    measured = [Measured(any_plan, [Trial(one, 0, 0)]) for one in seconds]
    assert training_plan._fastest(measured) is measured[chosen]


def test_memory_that_plans_do_not_know_is_searched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no plan stays within the budget, the excess counts as memory beside the training."""
    monkeypatch.setattr(situation, "_reserve", lambda *_: 1 << 28)
    free = planned(monkeypatch, Runs(), measure=False, fixed={"activations": "keep", "micro_batch": BATCH})
    runs = Runs(*[(1.0, 1 << 30)] * 3)
    budget = free.peak_bytes + (1 << 20)
    plan = planned(monkeypatch, runs, device_memory=budget, freedom="rounding")
    # A larger reserve leaves no plan, so the least of those that ran is taken, and says so.
    assert len(runs.plans) == 1 and plan.reasons[-1]["text"].endswith("more than the budget")
    calls = []

    def larger_once(plans: Any, *_: Any) -> list[Measured]:
        calls.append(plans)
        used = [budget + 300_000 if len(calls) == 1 else one.peak_bytes for one in plans]
        return [Measured(one, [Trial(1.0, 0, size)]) for one, size in zip(plans, used, strict=True)]

    plan = planned(monkeypatch, larger_once, device_memory=budget, fixed={"precision": "fp32"})
    assert len(calls) == 2 and plan.peak_bytes <= budget
    assert "more than the budget" not in str(plan)


def test_plans_above_the_budget_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    for seed in range(60):
        situation = random_situation(random.Random(seed))
        try:
            best = plan(situation, "rounding")
        except ValueError:
            continue
        situation["device_memory"] = best["peak_bytes"] + random.Random(seed).randint(0, 300)
        best = candidates.search(situation, "rounding", {})
        second, plain = candidates.others(situation, "rounding", {}, best)
        for one in (second, plain):
            if one is not None:
                found.append(one)
                assert one["seconds"] >= best["seconds"] and one["peak_bytes"] <= situation["device_memory"]
                assert not candidates._same(one, best)
        if plain is not None:
            assert (plain["precision"], plain["optimizer_state"], plain["offload"]) == (
                "fp32",
                "8bit",
                "none",
            )
            assert {block["treatment"] for block in plain["checkpoints"]} == {"keep"}
            assert second is None or plain["seconds"] >= second["seconds"]
    assert len(found) > 60


class Steps(nn.Module):
    """A model with a buffer and a random part, whose gradients may be NaN although its loss is finite."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout()) for _ in range(3)))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.layers(x).square().mean()
        return y + (0 * y).sqrt() if self.broken else y


@pytest.mark.first
@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_weights_gradients_buffers_and_random_state_are_as_before(
    broken: bool, step_in_backward: bool
) -> None:
    model = Steps(broken)

    def example(rows: int) -> Tensor:
        loss: Tensor = model(torch.ones(rows, 16))
        return loss

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = shoestring.plan_training(
        model, example=example, batch_size=4, freedom="rounding", fixed={"step_in_backward": step_in_backward}
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())
    said = "not measured: expected finite gradients" if broken else "measured: "
    assert plan.reasons[-1]["text"].startswith(said)


def test_a_plan_without_reasons() -> None:
    """A choice that the model has decided is no reason."""
    model = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))).bfloat16()

    def example(rows: int) -> Tensor:
        loss: Tensor = model(torch.ones(rows, 8, dtype=torch.bfloat16)).float().square().mean()
        return loss

    fixed = {"optimizer_state": "8bit", "activations": "keep"}
    plan = shoestring.plan_training(model, example=example, batch_size=1, measure=False, fixed=fixed)
    assert plan.precision == "as the weights" and plan.reasons == []


def test_long_batches_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, lambda *_: [])
    assert plan.reasons[-1]["text"] == "not measured: it would take too long"


@pytest.mark.parametrize(
    ("seconds", "count"),
    [((1.0, 2.0, 3.0), 3), ((2.0, 3.0, 9.0), 2), ((7.0, 1.0, 1.0), 0), ((8.0, 1.0, 1.0), 0)],
)
def test_plans_that_take_long_are_left_out(
    seconds: tuple[float, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial has two batches, of two micro-batches at most, and all of them take 15 s at most."""
    monkeypatch.setattr(trial, "run_trial", lambda *_, **__: Trial(6.0, 0, 0))
    monkeypatch.setattr(shoestring.TrainingPlan, "apply", lambda *_: shoestring.AppliedPlan())
    content = plan(random_situation(random.Random(0)))
    plans = [
        shoestring.TrainingPlan(content | {"accumulate": 1, "seconds": one, "least_seconds": 0.0})
        for one in seconds
    ]
    measured = trial.run_trials(plans, nn.Linear(1, 1), lambda rows: torch.ones(()), torch.optim.SGD)
    assert [one.plan.seconds for one in measured] == list(seconds[:count])


def test_fastest_of_trials() -> None:
    trials = [Trial(seconds, 0, size) for seconds, size in ((3.0, 5), (1.0, 7), (2.0, 6))]
    measured = Measured(shoestring.TrainingPlan(plan(random_situation(random.Random(0)))), trials)
    assert (measured.seconds, measured.process_bytes) == (1.0, 7)

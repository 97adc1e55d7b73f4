"""Test plans of several processes: the strategy by memory and link, predicted memory against processes, and errors."""

import functools
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan_training import BATCH, Layer, Model, example_of

import shoestring
from processes import run
from shoestring.distributed.links import Link
from shoestring.optim import AdamW
from shoestring.planning import processes, situation
from shoestring.planning.candidates import NoPlanError
from shoestring.planning.processes import Sharing

FAST, SLOW = "1000Gbit,1us", "10Mbit,1ms"


class Wide(Model):
    """A model whose weights need more memory than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(20))


def planned(**options: Any) -> shoestring.TrainingPlan:
    torch.manual_seed(0)
    model = Wide()
    given = {"processes": 2, "link": FAST} | options
    fixed = {"optimizer_state": "fp32"} | given.pop("fixed", {})
    return shoestring.plan_training(model, example=example_of(model), batch_size=BATCH, fixed=fixed, **given)


@pytest.fixture
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(situation, "_reserve", lambda *_: 0)


def test_a_model_that_fits_is_replicated(no_reserve: None) -> None:
    plan = planned(link=SLOW)
    assert plan.parallel == "ddp" and plan.micro_batch * plan.accumulate == BATCH // 2
    assert plan.reasons[0]["text"].startswith("--parallel ddp: a batch takes ")
    assert " s over 10Mbit,1ms; zero1 " in plan.reasons[0]["text"]
    assert shoestring.TrainingPlan(plan.to_dict()).parallel == "ddp"


def test_bytes_on_a_slow_link_take_the_time_of_a_batch() -> None:
    """The machine is fast, so that the time of its computation is small."""
    plan = planned(link=SLOW, hardware="nvidia-h200", fixed={"precision": "fp32"})
    sent = 8 * sum(p.numel() for p in Wide().parameters()) / 2 / 1.25e6
    assert plan.parallel == "ddp" and plan.seconds == pytest.approx(sent, rel=0.2)


def test_a_model_that_does_not_fit_is_split(no_reserve: None) -> None:
    whole = planned(link=SLOW)
    plan = planned(link=SLOW, device_memory=whole.frontier[0]["peak_bytes"] - 1)
    assert plan.parallel in ("zero1", "zero2", "zero3") and plan.peak_bytes < whole.peak_bytes
    assert "; ddp does not fit, since it needs " in plan.reasons[0]["text"]
    with pytest.raises(ValueError, match="^plan_training: expected device_memory of at least"):
        planned(device_memory="1MiB")


def test_the_link_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest strategy over the link is taken, unless another one that fits splits less and is about as fast."""
    seconds = {"ddp": None, "zero1": 3.0, "zero2": 2.1, "zero3": 2.0}

    def plan(self: Sharing, *_: Any) -> dict[str, Any]:
        taken = seconds[self.strategy]
        if taken is None:
            raise NoPlanError("plan_training: expected device_memory of at least 9 bytes (3 GiB), received 1")
        return {"seconds": taken, "reasons": []}

    monkeypatch.setattr(Sharing, "plan", plan)
    chosen = functools.partial(
        processes.plan_ranks, Model(), {"host_is_device": True}, "exact", {}, AdamW, 2, Link(1e9, 1e-6)
    )
    [reason] = chosen()["reasons"]
    assert reason["lever"] == "parallel" and reason["text"] == (
        "--parallel zero2: a batch takes 2.1 s over 8Gbit,1us; zero1 3 s; zero3 2 s; "
        "ddp does not fit, since it needs 3 GiB"
    )
    seconds["zero2"] = 2.3
    assert chosen()["seconds"] == 2.0


def _trained(rank: int, strategy: str, fixed: dict[str, Any]) -> None:
    """Compare the plan of a strategy with what a process allocates in its third step."""
    torch.manual_seed(0)
    model = Wide()
    budgets = situation.Budgets(None, None, 0, None)
    given = {name: str(value) for name, value in fixed.items()} | {"precision": "fp32"}
    found, _ = situation.measure_situation(
        model, example_of(model), BATCH // 2, budgets, "adamw", {}, given | {"optimizer_state": "fp32"}
    )
    found["reserve_bytes"] = 0
    given |= {"optimizer_state": "fp32"}
    content = Sharing(strategy, model, AdamW, 2, Link(1e9, 1e-6), gloo=True).plan(found, "exact", given)
    del model, found
    gc.collect()
    with shoestring.host_allocator() as allocator:
        before = allocator.stats().allocated
        plan = shoestring.TrainingPlan(content)
        model = Wide()
        plan.apply(model)
        report = shoestring.parallelize(model, strategy)
        optimizer = AdamW(model.parameters(), lr=1e-3, **plan.optimizer)
        example = example_of(model)
        for _ in range(3):
            allocator.reset_peaks()
            for number in range(plan.accumulate):
                with report.no_sync() if number + 1 < plan.accumulate else nullcontext():
                    (example(plan.micro_batch) / plan.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = allocator.stats().peak_allocated - before

    assert plan.peak_bytes == pytest.approx(peak, rel=0.05), (plan.phases, peak, plan.peak_bytes / peak)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "fixed",
    [{"micro_batch": 4, "activations": "keep"}, {"micro_batch": 1, "activations": "recompute"}],
    ids=str,
)
def test_predicted_bytes_are_those_of_a_process(strategy: str, fixed: dict[str, Any], tmp_path: Path) -> None:
    run(2, tmp_path, _trained, strategy, fixed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes: expected a number of processes of at least 1, received 0"),
        ({"processes": 3}, "batch_size: expected a multiple of the 3 processes, received 8"),
        ({"processes": 1}, "link: expected None for one process, received '1000Gbit,1us'"),
        ({"link": None}, "link: expected bandwidth and latency, such as '10Gbit,50us'"),
        (
            {"fixed": {"step_in_backward": True}},
            "fixed: step_in_backward: expected false for several processes",
        ),
        ({"link": "fast"}, "link: expected bandwidth,latency, such as 100Mbit,30ms"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^plan_training: {message}"):
        planned(**options)

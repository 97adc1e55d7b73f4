"""Test plans of several processes: the strategy by memory and link, predicted memory against processes, and errors."""

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
from shoestring.training.run.processes import Processes

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
    mebibytes = sum(p.nbytes for p in Wide().parameters()) / 2**20
    sent = f"in which a rank sends {mebibytes:.3g} MiB of gradients"  # twice (N - 1) / N, with two processes
    assert f" s over 10Mbit,1ms, {sent}; zero1 " in plan.reasons[0]["text"]
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

    def plan(self: Sharing, _: object, freedom: str, given: dict[str, str]) -> dict[str, Any]:
        assert not given
        taken = seconds[self.strategy]
        if taken is None:
            raise NoPlanError("plan_training: expected device_memory of at least 9 bytes (3 GiB), received 1")
        return {"seconds": taken, "reasons": []}

    monkeypatch.setattr(Sharing, "plan", plan)
    monkeypatch.setattr(Sharing, "traffic", lambda *_: {"gradients": 2.0**21, "weights": 2.0**20})

    def chosen(model: torch.nn.Module | None = None, **given: str) -> dict[str, Any]:
        found = {"host_is_device": True}
        link = Link(1e9, 1e-6)
        return processes.plan_ranks(model or Model(), found, "exact", given, AdamW, 2, link)

    [reason] = chosen()["reasons"]
    sent = "over 8Gbit,1us, in which a rank sends 2 MiB of gradients and 1 MiB of weights"
    assert reason["lever"] == "parallel" and reason["text"] == (
        f"--parallel zero2: a batch takes 2.1 s {sent}; zero1 3 s; zero3 2 s; ddp does not fit, since it needs 3 GiB"
    )
    seconds["zero2"] = 2.3
    assert chosen()["seconds"] == 2.0
    [reason] = chosen(parallel="zero1")["reasons"]
    assert reason["text"] == f"--parallel zero1: as given: a batch takes 3 s {sent}"
    with pytest.raises(ValueError, match="expected device_memory of at least 9 bytes"):
        chosen(parallel="ddp")

    scalar = Model()
    scalar.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    why = "expected parameters with rows, received scale without a dimension"
    found = chosen(scalar)
    assert found["parallel"] == "zero2" and found["reasons"][0]["text"].endswith(f"zero3 is left out: {why}")
    with pytest.raises(ValueError, match=f"parallel: expected ddp .* for this model, received zero3: {why}"):
        chosen(scalar, parallel="zero3")


def test_split_weights_do_not_split_blocks_of_codes() -> None:
    """zero3 takes no part for a quantised weight whose rows are no whole blocks, as parallelize refuses it."""
    for features, message in (
        (128, ""),
        (100, "expected weights whose rows 2 processes can split, received 1.weight: "),
    ):
        layers = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(features, 64))
        shoestring.lora.apply(layers, quantize="nf4")
        why = processes._why_not_split(layers, 2)
        assert (why or "").startswith(message) and (why is None) == (not message)


def test_split_weights_offload_no_activations() -> None:
    blocks = [{"gradient_bytes": 8, "choices": [{"name": name} for name in ("keep", "offload")]}]
    measured = {"rows": 1, "freed": blocks, "kept": blocks}
    split, whole = (
        Sharing(s, Model(), AdamW, 2, Link(1, 1), False)._pass(measured) for s in ("zero3", "ddp")
    )
    assert whole["freed"] == whole["kept"] == blocks
    assert split["freed"] == [{"gradient_bytes": 8, "choices": [{"name": "keep"}]}]
    assert split["kept"] == [{"gradient_bytes": 4, "choices": [{"name": "keep"}]}]
    why = processes._why_not_split(Model(), 2, "offload")
    assert why == "expected activations that stay on the device, received offload"


def _trained(rank: int, strategy: str, fixed: dict[str, Any]) -> None:
    """Compare the plan that the first process makes with what each process allocates in its third step."""
    situation._reserve = lambda *_: 0  # type: ignore[assignment]  # this process alone
    given = fixed | {"precision": "fp32", "parallel": strategy}
    content = Processes(rank, 2).from_first(lambda: planned(fixed=given).to_dict())
    assert content["parallel"] == strategy
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
        (
            {"fixed": {"parallel": "hsdp"}},
            "fixed: parallel: expected ddp | zero1 | zero2 | zero3, received hsdp",
        ),
        (
            {"processes": 1, "link": None, "fixed": {"parallel": "ddp"}},
            "fixed: parallel: expected none, received ddp",
        ),
        ({"link": "fast"}, "link: expected bandwidth,latency, such as 100Mbit,30ms"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^plan_training: {message}"):
        planned(**options)

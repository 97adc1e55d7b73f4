"""Test plans for a machine that is not here: times against counts by hand and against measured ones, and missing rates."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_plan_training import BATCH, Model, example_of
from torch import Tensor, nn

import shoestring
from shoestring.planning import measure, situation, training_plan
from shoestring.planning.machine import Link
from shoestring.planning.measure import ELEMENTS, Probe, rates_of, run_probes
from shoestring.planning.trial import run_trial

H200 = shoestring.hardware_profile("nvidia-h200")
CPU = torch.device("cpu")
WIDTH, TOKENS, BLOCKS, FEATURES = 256, 512, 6, 8


def with_rates(**products: float | None) -> shoestring.Machine:
    """Return the H200 with other rates of products."""
    rates = {**H200.gemm_flops, **products}
    reasons = {name: why for name, why in H200.not_measured.items() if not name.startswith("gemm_flops")}
    missing = {f"gemm_flops.{name}": "a test says so" for name, rate in rates.items() if rate is None}
    return replace(H200, gemm_flops=rates, not_measured=reasons | missing)


def linear_model() -> tuple[nn.Module, Any]:
    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    blocks = (nn.Sequential(linear(), linear()) for _ in range(BLOCKS))
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH, bias=False), nn.Sequential(*blocks))

    def example(rows: int) -> Tensor:
        loss: Tensor = model(torch.ones(rows * TOKENS, FEATURES)).sum()
        return loss

    return model, example


def product_seconds(tokens: int, inputs: int, outputs: int, rate: str = "fp32") -> float:
    """Return the longer one of the times of a product and of its bytes."""
    flops = H200.gemm_flops[rate]
    assert flops is not None and H200.copy_bytes_per_second is not None
    moved = 4 * (tokens * inputs + tokens * outputs + inputs * outputs)
    return max(2 * tokens * inputs * outputs / flops, moved / H200.copy_bytes_per_second)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_times_of_linear_layers_against_counts_by_hand(micro_batch: int) -> None:
    model, example = linear_model()

    def planned(activations: str) -> shoestring.TrainingPlan:
        fixed = {"precision": "fp32", "activations": activations, "micro_batch": micro_batch}
        plan = shoestring.plan_training(
            model,
            example=example,
            batch_size=8,
            hardware="nvidia-h200",
            fixed=fixed | {"optimizer_state": "8bit"},
        )
        assert plan.machine == "NVIDIA H200" and not any("measured" in one["text"] for one in plan.reasons)
        return plan

    keep, recompute = planned("keep"), planned("recompute")
    tokens = micro_batch * TOKENS
    layer = product_seconds(tokens, WIDTH, WIDTH)
    # The first layer has no gradient of its input. The loss reads the output, and its gradient is written.
    first = 2 * product_seconds(tokens, FEATURES, WIDTH)
    assert H200.copy_bytes_per_second is not None
    ends = first + 4 * tokens * WIDTH / H200.copy_bytes_per_second
    step = sum(p.numel() for p in model.parameters()) * H200.optimizer_seconds["nearest"]["8bit"]  # type: ignore[operator]
    passes = 8 // micro_batch
    assert keep.seconds == pytest.approx(passes * (3 * 2 * BLOCKS * layer + ends) + step, rel=0.03)
    # A block computes the output of its first layer again.
    more = recompute.seconds - keep.seconds
    assert more == pytest.approx(passes * BLOCKS * max(layer, 1e-6), rel=0.05)
    assert recompute.peak < keep.peak


def test_bytes_are_those_of_passes_here_and_memory_is_that_of_the_machine() -> None:
    torch.manual_seed(0)
    model = Model()
    arguments: Any = {"example": example_of(model), "batch_size": BATCH, "fixed": {"precision": "fp32"}}
    here = shoestring.plan_training(model, measure=False, **arguments)
    there = shoestring.plan_training(model, hardware=H200, **arguments)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert there.phases[0]["bytes"] == weights < here.phases[0]["bytes"]
    fixed = {"micro_batch": 4, "activations": "recompute", "optimizer_state": "8bit", "precision": "fp32"}
    arguments["fixed"] = fixed
    here = shoestring.plan_training(model, measure=False, **arguments)
    there = shoestring.plan_training(model, hardware=H200, **arguments)
    assert here.peak - here.phases[0]["bytes"] == pytest.approx(there.peak - weights, rel=0.01)
    small = replace(H200, memory_bytes=there.peak // 2)
    with pytest.raises(ValueError, match=r"device_memory of at least \d+ bytes"):
        shoestring.plan_training(model, hardware=small, **arguments)


def test_a_plan_does_not_depend_on_the_speed_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(situation, "LONGEST_PASS", 1e-9)  # as if this machine were very slow
    model, example = linear_model()
    asked = set()

    def recorded(rows: int) -> Tensor:
        asked.add(rows)
        return example(rows)

    arguments: Any = {"example": recorded, "batch_size": 8, "fixed": {"precision": "fp32"}}
    shoestring.plan_training(model, hardware=H200, **arguments)
    assert asked == {1, 8}
    monkeypatch.setattr(situation, "LARGEST_PASS", 1)
    asked.clear()
    shoestring.plan_training(model, hardware=H200, **arguments)
    assert asked == {1, 2}


def test_choices_without_a_rate_are_left_out_and_reasons_say_so() -> None:
    model, example = linear_model()

    def planned(machine: shoestring.Machine, **options: Any) -> shoestring.TrainingPlan:
        return shoestring.plan_training(
            model, example=example, batch_size=4, freedom="rounding", hardware=machine, **options
        )

    assert planned(H200).precision == "bf16"
    plan = planned(with_rates(bf16=None))
    assert plan.precision == "fp32"
    assert "bf16 is left out: NVIDIA H200 has no rate gemm_flops.bf16, since a test says so" in str(plan)
    plan = planned(H200, disk="/no/such/folder=1GiB")
    assert str(plan).count("nvme:/no/such/folder is left out: NVIDIA H200 has no rate disks") == 1
    disk = Link(1e9, 2e9, 0.0)
    away = {"offload": "nvme:/no/such/folder", "optimizer_state": "8bit", "step_in_backward": False}
    plan = planned(replace(H200, disks={"/no/such/folder": disk}), disk="/no/such/folder=1GiB", fixed=away)
    beside = planned(H200, fixed=away | {"offload": "none", "micro_batch": plan.micro_batch})
    # State of 8 bits is read and written in each step; writing is the slower one.
    assert plan.seconds - beside.seconds == pytest.approx(plan.disk_bytes / 1e9, rel=0.1)
    bf16 = shoestring.plan_training(
        model.to(torch.bfloat16),
        example=lambda rows: model(torch.ones(rows * TOKENS, FEATURES, dtype=torch.bfloat16)).sum(),
        batch_size=4,
        hardware=H200,
    )
    assert bf16.optimizer_state == "8bit"
    assert "fp32 is left out: NVIDIA H200 has no rate optimizer_seconds.stochastic.fp32" in str(bf16)


def test_activations_leave_on_a_machine_with_a_link() -> None:
    """A GPU whose link was measured may offload activations, whose bytes were measured here. A CPU never does."""
    model, example = linear_model()
    arguments: Any = {"example": example, "batch_size": 8}
    fixed = {"precision": "fp32", "micro_batch": 8, "optimizer_state": "8bit"}

    def planned(machine: shoestring.Machine, treatment: str) -> shoestring.TrainingPlan:
        given = fixed | {"activations": treatment}
        return shoestring.plan_training(model, hardware=machine, fixed=given, **arguments)

    reasons = {name: why for name, why in H200.not_measured.items() if name != "link"}
    linked = replace(H200, link=Link(2e13, 2e13, 0.0), not_measured=reasons)
    away, keep = planned(linked, "offload"), planned(linked, "keep")
    moved = sum(one["link_bytes"] for one in away.checkpoints)
    # Each linear layer of a block saves its input.
    assert moved == away.host_bytes == 2 * BLOCKS * 8 * TOKENS * WIDTH * 4
    assert away.peak < keep.peak and away.seconds == pytest.approx(keep.seconds, rel=0.05)
    slow = replace(linked, link=Link(1e9, 1e9, 0.0))
    assert planned(slow, "offload").seconds > keep.seconds + moved / 1e9
    for machine in (H200, replace(linked, device="cpu")):
        with pytest.raises(
            ValueError, match=r"fixed: activations: expected keep .*recompute, received offload"
        ):
            planned(machine, "offload")
    said = "offload is left out: NVIDIA H200 has no rate link, since"
    assert said in str(planned(H200, "keep")) and said not in str(keep)


def test_wrong_machines() -> None:
    model, example = linear_model()
    with pytest.raises(ValueError, match="hardware_profile: name: expected one of nvidia-h200"):
        shoestring.plan_training(model, example=example, batch_size=4, hardware="nvidia-h300")
    nothing = with_rates(**dict.fromkeys(H200.gemm_flops))
    with pytest.raises(ValueError, match=r"plan_training: hardware: expected rates .* fp32 is left out"):
        shoestring.plan_training(model, example=example, batch_size=4, hardware=nothing)


def test_another_machine_is_planned_for_and_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_plan, "run_trials", lambda *_: pytest.fail("a plan was run"))
    model, example = linear_model()
    assert shoestring.plan_training(model, example=example, batch_size=2, hardware=H200).seconds > 0


def test_a_measured_machine_has_the_time_of_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(situation, "known_machine", lambda device: H200)
    weight = [nn.Parameter(torch.empty(ELEMENTS))]
    seconds = situation._step_seconds(shoestring.optim.AdamW, weight, "4bit", None)
    assert seconds == H200.optimizer_seconds["nearest"]["4bit"]
    # The rates are those of AdamW, of large tensors.
    fewer = [nn.Parameter(torch.empty(4096))]
    assert situation._step_seconds(shoestring.optim.AdamW, fewer, "4bit", None) > 10 * seconds
    assert situation._step_seconds(shoestring.optim.Lion, weight, "4bit", None) > 10 * seconds


def machine_here() -> shoestring.Machine:
    """Return this machine, with the rates alone that a plan in fp32 with 8-bit state needs."""
    shape = (1024, 512, 1024)
    probes = [
        Probe("product", lambda: measure._products(CPU, "fp32", *shape), 6 * shape[0] * shape[1] * shape[2]),
        Probe("copy", lambda: measure._copy(CPU), 2 * measure.COPY_BYTES),
        Probe("step", lambda: measure._optimizer(CPU, "8bit", "nearest"), ELEMENTS),
    ]
    run_probes(probes, CPU, time.perf_counter() + 60, time.perf_counter)
    rates = rates_of(probes)
    steps = {**H200.optimizer_seconds["nearest"], "8bit": 1 / rates["step"]}
    return replace(
        with_rates(fp32=rates["product"]),
        device="cpu",
        copy_bytes_per_second=rates["copy"],
        optimizer_seconds={**H200.optimizer_seconds, "nearest": steps},
    )


@pytest.mark.alone
def test_predicted_times_are_those_of_a_machine_that_was_measured() -> None:
    """Quiet machines are within 30 %. Other programs only make a pass longer, so the fastest one counts."""
    width, machine = 512, machine_here()
    blocks = (
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
    )
    wide = nn.Sequential(nn.Linear(8, width), nn.Sequential(*blocks))
    decoder = Model()
    models: list[tuple[nn.Module, Any]] = [
        (wide, lambda rows: wide(torch.ones(rows * 64, 8)).square().mean()),
        (decoder, lambda rows: decoder(torch.arange(rows * 256).view(rows, 256) % 500)),
    ]
    fixed = {"precision": "fp32", "micro_batch": 8, "optimizer_state": "8bit", "activations": "keep"}
    for model, example in models:
        plan = shoestring.plan_training(model, example=example, batch_size=8, hardware=machine, fixed=fixed)
        took = [run_trial(plan, model, example, shoestring.optim.AdamW).seconds for _ in range(5)]
        assert 0.3 < plan.seconds / min(took) < 3

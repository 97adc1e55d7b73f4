"""A plan of a whole step knows the memory of the device and of the host, also if activations leave the device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import Tensor, nn

import shoestring
from shoestring.planning import candidates, situation, training_plan
from shoestring.planning.machine import Link
from shoestring.planning.situation import Json

BATCH, BLOCKS = 4, 5


def model_on(device: str) -> tuple[nn.Module, Any]:
    """Return a model with 5 blocks, and its loss of so many rows."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(BLOCKS))
    model = nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 8)).to(device)

    def example(rows: int) -> Tensor:
        loss: Tensor = model(torch.ones(rows, 128, 16, device=device)).square().mean()
        return loss

    return model, example


def measured(model: nn.Module, example: Any, monkeypatch: pytest.MonkeyPatch) -> Json:
    """Measure the bytes of a model in fp32. A row of each block takes 1 ms forward, and the link is faster than that."""
    monkeypatch.setattr(situation, "measure_copies", lambda *_: Link(1e10, 1e10, 0.0))
    none = situation.Budgets(None, None, None, None)
    given = {"precision": "fp32", "optimizer_state": "8bit"}
    found, refused = situation.measure_situation(model, example, BATCH, none, "adamw", {}, given)
    assert refused == []
    [form] = found["forms"]
    for one in form["passes"]:
        for block in (*one["freed"], *one["kept"]):
            forward = 1e-3 * one["rows"]
            block |= {"forward_seconds": forward, "backward_seconds": 2 * forward}
            for choice in block["choices"]:
                is_recomputed = choice["name"] not in ("keep", "offload", "before", "behind")
                choice["extra_seconds"] = forward if is_recomputed else 0.0
    return found


def planned(found: Json, **fixed: str) -> shoestring.TrainingPlan:
    return shoestring.TrainingPlan(candidates.search(found, "exact", fixed))


def treatments(plan: shoestring.TrainingPlan) -> list[str]:
    return [block["treatment"] for block in plan.checkpoints]


def gradients(model: nn.Module, example: Any, rows: int) -> list[Tensor]:
    model.zero_grad()
    example(rows).backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_activations_leave(mode: simdev.Mode, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is fast, so activations leave. Bytes are those of the plan, and gradients those of plain training."""
    stores: list[weakref.ref[shoestring.offload_activations]] = []

    def recorded(**options: Any) -> shoestring.offload_activations:
        store = shoestring.offload_activations(**options)
        stores.append(weakref.ref(store))
        return store

    monkeypatch.setattr(training_plan, "offload_activations", recorded)
    model, example = model_on("simdev")
    found = measured(model, example, monkeypatch)
    fixed = {"micro_batch": str(BATCH)}
    low, *_, high = [point["peak_bytes"] for point in planned(found, **fixed).frontier]
    found["device_memory"] = budget = int(low + share * (high - low))
    plan = planned(found, **fixed)
    moved = sum(block["link_bytes"] for block in plan.checkpoints)
    assert any("offload" in one for one in treatments(plan)) and moved == plan.host_bytes > 0
    # Without copies, no plan fits, or it takes longer.
    try:
        assert planned(found | {"host_is_device": True}, **fixed).seconds > plan.seconds
    except ValueError as error:
        assert "device_memory of at least" in str(error)
    before = [(type(module), dict(module.__dict__)) for module in model.modules()]
    expected = gradients(model, example, BATCH)
    model.zero_grad()
    applied = plan.apply(model)
    check = plan.check(model, example)
    assert check.predicted_bytes == pytest.approx(check.measured_bytes, rel=0.05)
    assert check.measured_bytes <= 1.001 * (check.predicted_bytes + budget - plan.peak)
    moving = gradients(model, example, BATCH)
    [alive] = stores
    store = alive()
    assert store is not None
    figures = store.statistics()
    del store
    assert figures["entries"] == 0 and figures["copied_out"] > 0
    applied.undo()
    assert alive() is None  # undo() frees the host memory
    assert all(torch.equal(a, b) for a, b in zip(moving, expected, strict=True))
    assert before == [(type(module), dict(module.__dict__)) for module in model.modules()]
    again = gradients(model, example, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_budget_of_host_memory(mode: simdev.Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = model_on("simdev")
    found = measured(model, example, monkeypatch)
    fixed = {"micro_batch": str(BATCH)}
    away = planned(found, activations="offload", **fixed)
    [link] = {block["link_bytes"] for block in away.checkpoints}
    found["device_memory"] = away.peak + link // 4
    assert away.host_bytes == BLOCKS * link and planned(found, **fixed).host_bytes > 2 * link
    for count in (2, 0):
        plan = planned(found | {"host_memory": count * link}, **fixed)
        assert [one for one in treatments(plan) if "offload" in one] == treatments(plan)[:count]
        assert plan.host_bytes == count * link


def test_a_cpu_has_no_other_memory() -> None:
    model, example = model_on("cpu")
    with pytest.raises(
        ValueError, match=r"fixed: activations: expected keep \| .*recompute, received offload"
    ):
        shoestring.plan_training(model, example=example, batch_size=BATCH, fixed={"activations": "offload"})

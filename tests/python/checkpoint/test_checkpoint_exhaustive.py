"""Run every possible checkpoint plan of small models: checkpoint_model's choice is within 2% of the best.

The allocator's meter measures the peak memory of each plan, and the planner's cost model predicts the times.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from test_checkpoint_model import TOKENS, Model, step
from torch import nn

import shoestring
from shoestring.checkpoint import model as planner
from shoestring.checkpoint.blocks import Treatment, treat
from shoestring.checkpoint.costs import CHOICES
from shoestring.checkpoint.planner import PlanBlock, checkpoint_plan, simulate_checkpoint_plan


def plan(model: nn.Module, budget: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[PlanBlock]]:
    """Apply checkpoint_model with a budget. Return its report and the blocks that the planner received."""
    rows: list[list[PlanBlock]] = []

    def seen(row: list[PlanBlock], *args: Any, **options: Any) -> Any:
        rows.append(row)
        return checkpoint_plan(row, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(planner, "checkpoint_plan", seen)
        report = shoestring.checkpoint_model(model, budget=budget, example=[TOKENS])
    return report, rows[0]


@pytest.mark.parametrize(
    ("depth", "width"),
    [
        (2, 80),
        (3, 64),
        *(pytest.param(*size, marks=pytest.mark.nightly) for size in [(3, 96), (3, 128), (4, 48)]),
    ],
    ids=str,
)
def test_no_other_plan_is_better(depth: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(depth, width)
    free = step(model)[0]
    report, row = plan(model, 2 * free, monkeypatch)
    report.undo()
    names = [choice.name for choice in row[1].choices]
    # A block has four choices: to keep nothing, attention, attention and matrix products, or everything.
    assert len(names) == 4
    peaks = {}
    for names_of_plan in itertools.product(names, repeat=depth):
        undo = [
            treat(layer, Treatment(CHOICES[name]))
            for layer, name in zip(model.layers, names_of_plan, strict=True)
        ]
        peaks[names_of_plan] = step(model)[0]
        for one in undo:
            one()
        numbers = [0, *(names.index(name) for name in names_of_plan), 0]
        predicted = simulate_checkpoint_plan(row, numbers, 2 * free).peak_bytes
        assert abs(predicted - peaks[names_of_plan]) <= 0.05 * peaks[names_of_plan], names_of_plan
    levels = sorted(set(peaks.values()))
    for peak in (levels[0], levels[len(levels) // 3], levels[2 * len(levels) // 3]):
        budget = int(1.01 * peak)
        report, row = plan(model, budget, monkeypatch)
        measured = step(model)[0]
        report.undo()
        seconds = {
            names_of_plan: simulate_checkpoint_plan(
                row, [0, *map(names.index, names_of_plan), 0], budget
            ).seconds
            for names_of_plan in peaks
        }
        best = min(seconds[names_of_plan] for names_of_plan, peak in peaks.items() if peak <= budget)
        assert measured == peaks[report.plan.names[1:-1]] <= budget
        assert report.plan.seconds <= 1.02 * best

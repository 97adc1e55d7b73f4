"""The time of a batch of which a trial runs some micro-batches."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.planning import trial


@pytest.mark.parametrize(("accumulate", "expected"), [(1, 1.0), (2, 4.0), (3, 7.0), (8, 22.0)])
def test_micro_batches_that_do_not_run_take_the_time_of_those_in_the_middle(
    accumulate: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first micro-batch takes 1 s, since it makes gradients, and each other one 3 s."""
    model = nn.Linear(4, 4)
    plan: Any = SimpleNamespace(
        accumulate=accumulate, micro_batch=2, step_in_backward=False, autocast=lambda _: nullcontext()
    )
    now, calls = 0.0, 0

    def example(rows: int) -> Tensor:
        nonlocal now, calls
        now += 3.0 if calls else 1.0
        calls += 1
        loss: Tensor = model(torch.ones(rows, 4)).sum()
        return loss

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seconds = trial._batch(
        plan, example, optimizer, list(model.parameters()), torch.device("cpu"), trial.PASSES
    )
    assert seconds == expected and calls == min(accumulate, trial.PASSES)

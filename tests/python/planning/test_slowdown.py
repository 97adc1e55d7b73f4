"""Times of blocks that were measured alone, as they are in whole steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoestring.checkpoint.costs import ModelCosts, measure_model
from shoestring.checkpoint.measure import Cost, Step, gradients_aside, no_collection


def cost(forward: float, backward: float) -> Cost:
    return Cost(forward, backward, 0, 0, 0)


def step(seconds: float) -> Step:
    kinds: list[tuple[Any, ...]] = [("block",), ("block",)]
    return Step([nn.Identity()] * 2, kinds, {}, cost(0.5, 0.5), cost(1.0, 1.0), 0, seconds)


def costs(treated: float, kept: float, plain: float | None) -> ModelCosts:
    """Return costs whose parts take 13 s if blocks are recomputed, and 9 s if they are kept."""
    of_kind = {("block",): {"keep": cost(1.0, 2.0), "recompute": cost(1.0, 4.0)}}
    return ModelCosts(step(treated), of_kind, (step(kept), {}), None if plain is None else step(plain))


@pytest.mark.parametrize(
    ("treated", "kept", "plain", "factors"),
    [
        (26.0, 39.0, 13.5, (1.5, 2.0)),
        (39.0, 26.0, None, (2.0, 2.0)),  # steps without treatments did not fit
        (10.0, 12.0, 8.0, (1.0, 1.0)),  # a whole step is never faster than its parts
    ],
)
def test_parts_are_as_slow_as_in_whole_steps(
    treated: float, kept: float, plain: float | None, factors: tuple[float, float]
) -> None:
    found = costs(treated, kept, plain).in_whole_steps()
    keep, recompute = found.of_kind["block",]["keep"], found.of_kind["block",]["recompute"]
    slower_keep, slower_recompute = factors
    assert (keep.forward_seconds, keep.backward_seconds) == (slower_keep, 2 * slower_keep)
    assert (recompute.forward_seconds, recompute.backward_seconds) == (slower_recompute, 4 * slower_recompute)
    assert found.kept is not None
    for one in (found.step, found.kept[0]):
        assert (one.before, one.after) == (
            cost(0.5, 0.5).slower(slower_keep),
            cost(1.0, 1.0).slower(slower_keep),
        )


@pytest.mark.parametrize(("room", "runs"), [(None, True), (2**30, True), (0, False)])
def test_steps_without_treatments_run_if_they_have_room(room: int | None, runs: bool) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    with no_collection(), gradients_aside(model) as aside:
        found = measure_model(
            "test", model, list(model), lambda: model(torch.ones(4, 8)).sum(), torch.device("cpu"), None,
            aside=aside, room=room,
        )  # fmt: skip
    assert (found.plain is not None) == runs
    if found.plain is not None:
        assert found.plain.seconds > 0

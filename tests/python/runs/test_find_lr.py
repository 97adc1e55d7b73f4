"""Tests that ``find_lr`` finds a learning rate and leaves no trace."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring.optim import SAM, AdamW, GaLore, Muon

MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "AdamW on the host": lambda model: AdamW(model.parameters(), lr=1e-3, offload="cpu"),
    "Muon": lambda model: Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3),
    "GaLore": lambda model: GaLore(model.parameters(), AdamW, lr=1e-3, rank=2),
    "SAM": lambda model: SAM(model.parameters(), AdamW, lr=1e-3),
    "torch.AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Dropout(0.1), nn.Linear(40, 1))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def step() -> Tensor:
        x = torch.randn(32, 16)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, SAM):
            return optimizer.step(closure)  # type: ignore[no-any-return]
        loss = closure()
        optimizer.step()
        return loss

    return step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    torch.set_printoptions(profile="full", precision=10)
    try:
        gradients = [p.grad for p in model.parameters()]
        state = (model.state_dict(), optimizer.state_dict(), gradients, torch.get_rng_state().tolist())
        return str(copy.deepcopy(state))
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_everything_is_as_before(name: str, steps_before: int) -> None:
    """State, gradients and random numbers are equal, and training goes on as without the search."""
    runs = []
    for searches in (False, True):
        model = net()
        optimizer = MAKERS[name](model)
        step = stepper(model, optimizer)
        for _ in range(steps_before):
            step()
        if searches:
            before = everything(model, optimizer)
            found = shoestring.find_lr(step, model, optimizer, start=1e-5, end=1.0, steps=40)
            assert 1e-5 < found.suggestion < 1.0
            assert everything(model, optimizer) == before
        runs.append([step().item() for _ in range(3)])
    assert runs[0] == runs[1]


def test_the_suggestion_lies_where_the_loss_falls() -> None:
    """On a quadratic with curvature 1, gradient descent falls from rates of about 1/steps and diverges above 2."""
    weight = nn.Parameter(torch.full((8,), 10.0))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    found = shoestring.find_lr(step, model, optimizer, start=1e-4, end=100.0, steps=200)
    assert 1e-2 < found.suggestion < 2.0
    assert all(one.losses[-1] > 0 and one.lrs[-1] < 100 for one in found.passes)  # ends where it diverges
    assert found.spread == 1.0  # nothing is random here
    assert found.passes[0].losses == found.passes[1].losses
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(weight, torch.full((8,), 10.0))


def test_groups_keep_their_ratio() -> None:
    model = net()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.05}], lr=1.0)
    seen = []
    step = stepper(model, optimizer)

    def watched() -> Tensor:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return step()

    shoestring.find_lr(watched, model, optimizer, start=1e-4, end=1e-1, steps=30, passes=1)
    assert all(math.isclose(a, 10 * b) for a, b in seen)
    assert math.isclose(seen[0][0], 1e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def test_parts_are_restored() -> None:
    class Loader:
        position = 5

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    model, loader = net(), Loader()
    step = stepper(model, optimizer := MAKERS["AdamW"](model))
    starts = []

    def counted() -> Tensor:
        starts.append(loader.position)
        loader.position += 1
        return step()

    shoestring.find_lr(counted, model, optimizer, steps=20, start=1e-4, loader=loader)
    assert loader.position == 5
    assert starts.count(5) == 2  # each pass begins with the same batch


def test_an_error_in_step_restores_everything() -> None:
    model = net()
    optimizer = MAKERS["AdamW"](model)
    step = stepper(model, optimizer)
    before = everything(model, optimizer)
    calls = []

    def failing() -> Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise KeyError("batch")
        return step()

    with pytest.raises(KeyError, match="batch"):
        shoestring.find_lr(failing, model, optimizer)
    assert everything(model, optimizer) == before


def test_bad_curves_are_refused() -> None:
    model = net()
    optimizer = MAKERS["torch.AdamW"](model)
    rising = iter(range(1000))
    with pytest.raises(
        ValueError, match="^find_lr: step: expected a loss that falls at some learning rate from 1e-07 to"
    ):
        shoestring.find_lr(lambda: 1.0 + 0.01 * next(rising), model, optimizer)
    with pytest.raises(ValueError, match="that never fell below its start"):
        shoestring.find_lr(lambda: math.nan, model, optimizer)
    with pytest.raises(ValueError, match="that never fell below its start"):
        shoestring.find_lr(lambda: 1.0, model, optimizer)

    def scheduled() -> float:
        optimizer.param_groups[0]["lr"] = 0.25
        return 1.0

    with pytest.raises(
        ValueError, match="a step that leaves the learning rate alone, received one that has set it to 0.25"
    ):
        shoestring.find_lr(scheduled, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.0}, "start: expected a number above 0, received 0"),
        ({"end": 1e-8}, "end: expected a number above start, 1e-07, received 1e-08"),
        ({"steps": 9}, "steps: expected a number of at least 10, received 9"),
        ({"passes": 0}, "passes: expected a number of at least 1, received 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=f"^find_lr: {message}"):
        shoestring.find_lr(lambda: 1.0, model, MAKERS["AdamW"](model), **options)


def test_wrong_losses() -> None:
    model = net()
    optimizer = MAKERS["AdamW"](model)
    with pytest.raises(ValueError, match=r"returns one loss, received a tensor of shape \(2,\)"):
        shoestring.find_lr(lambda: torch.zeros(2), model, optimizer)
    with pytest.raises(ValueError, match="returns one loss, received NoneType"):
        shoestring.find_lr(lambda: None, model, optimizer)  # type: ignore[arg-type, return-value]


def test_plot(tmp_path: Path) -> None:
    model = net()
    optimizer = MAKERS["AdamW"](model)
    found = shoestring.find_lr(stepper(model, optimizer), model, optimizer, steps=30, start=1e-4)
    found.plot(tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    assert "learning rate" in text or "<svg" in text

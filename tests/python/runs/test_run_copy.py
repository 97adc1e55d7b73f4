"""Tests that copies of a run restore places: buffers that forward assigns anew, and weights outside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring.optim import AdamW, Averages, Guard


class Running(nn.Module):
    """A layer that assigns new tensors to its buffers, one of which is None at first."""

    mean: Tensor
    count: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0), persistent=False)
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count = self.count + 1
        self.last = x[0].clone()
        result: Tensor = self.layer(x - self.mean)
        return result


class Problem:
    """A model, and a weight of the loss that the same optimizer steps."""

    def __init__(self) -> None:
        self.model = Running()
        self.scale = nn.Parameter(torch.ones(1))
        self.optimizer = AdamW([*self.model.parameters(), self.scale], lr=1e-2, state_format="fp32")

    def loss(self, rows: int = 16) -> Tensor:
        self.optimizer.zero_grad()
        x = torch.randn(rows, 4)
        loss: Tensor = ((self.model(x) - x.sum(1, keepdim=True)) * self.scale).square().mean()
        loss.backward()
        return loss

    def step(self, rows: int = 16) -> Tensor:
        loss = self.loss(rows)
        self.optimizer.step()
        return loss

    def contents(self) -> list[Any]:
        buffers = {name: (b.data_ptr(), b.tolist()) for name, b in self.model.named_buffers()}
        return [buffers, *(p.tolist() for p in (*self.model.parameters(), self.scale))]

    def gradients(self) -> list[Any]:
        params = (*self.model.parameters(), self.scale)
        return [None if p.grad is None else p.grad.tolist() for p in params]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "search",
    [
        lambda p, step: shoestring.find_lr(step, p.model, p.optimizer, start=1e-4, end=1.0, steps=20),
        lambda p, step: shoestring.find_batch_size(step, p.model, p.optimizer, at_most=8),
    ],
    ids=["find_lr", "find_batch_size"],
)
def test_a_search_restores_places_and_weights_outside(search: Callable[..., Any], steps_before: int) -> None:
    problem = Problem()
    for _ in range(steps_before):
        problem.step()
    before = problem.contents(), problem.gradients()
    search(problem, problem.step)
    assert (problem.contents(), problem.gradients()) == before


def test_a_part_that_refuses_its_state_does_not_keep_others_from_it() -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("no")

    problem = Problem()
    before = problem.contents(), problem.gradients()
    with pytest.raises(ValueError, match="no"):
        shoestring.find_lr(
            problem.step, problem.model, problem.optimizer, start=1e-4, end=1.0, steps=20, part=Refuses()
        )
    assert (problem.contents(), problem.gradients()) == before
    assert problem.optimizer.param_groups[0]["lr"] == 1e-2


def test_sums_of_gradients_are_not_lost() -> None:
    problem = Problem()
    with problem.optimizer.accumulate():
        problem.model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        ValueError, match="find_lr: optimizers: expected gradients in .grad, received sums of accum"
    ):
        shoestring.find_lr(problem.step, problem.model, problem.optimizer)
    with pytest.raises(ValueError, match="find_batch_size: optimizers: expected gradients in .grad"):
        shoestring.find_batch_size(problem.step, problem.model, problem.optimizer, at_most=4)


def test_a_part_whose_state_changes_in_place() -> None:
    class Counts:
        def __init__(self) -> None:
            self.seen = {3}

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    problem, part = Problem(), Counts()

    def step(rows: int) -> None:
        part.seen.add(rows)
        problem.step(rows)

    shoestring.find_batch_size(step, problem.model, problem.optimizer, at_most=8, counts=part)
    assert part.seen == {3}


def test_a_rollback_restores_places() -> None:
    problem = Problem()
    problem.step()
    guard = Guard(problem.optimizer, on="rollback", model=problem.model)
    loss = problem.loss()
    at_copy = problem.contents()[0]
    guard.step(loss)
    guard.step(problem.loss())
    guard.step(problem.loss() * float("nan"))
    guard.step(problem.loss())
    assert guard.rollbacks == 1
    assert problem.contents()[0] == at_copy


def test_a_swap_restores_places() -> None:
    problem = Problem()
    averages = Averages(problem.model, decay=0.5)
    for _ in range(2):
        problem.step()
        averages.update()
    before = problem.contents()[0]
    del before["last"]
    with averages.swap():
        problem.model(torch.ones(2, 4))
    after = problem.contents()[0]
    assert {name: after[name] for name in before} == before


def test_statistics_that_forward_assigns_are_restored() -> None:
    class Assigns(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            assert self.running_mean is not None
            self.running_mean = self.running_mean * 2
            return result

    model = Assigns(2)
    model(torch.randn(8, 2))
    before = {name: (b.data_ptr(), b.tolist()) for name, b in model.named_buffers()}

    def batches() -> Any:
        yield torch.randn(8, 2)
        raise KeyError("data")

    with pytest.raises(KeyError):
        shoestring.optim.update_batch_norm(batches(), model)
    assert {name: (b.data_ptr(), b.tolist()) for name, b in model.named_buffers()} == before

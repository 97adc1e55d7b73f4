"""Tests that ``find_batch_size`` finds the largest size that fits, and that ``memory_advice`` computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.optim import AdamW
from shoestring.runs.find_batch_size import is_out_of_memory

MIB = 2**20


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(16, 1)


class Limited:
    """A step that fails above a number of rows, as an allocator of a GPU does."""

    def __init__(self, most: int, error: type[BaseException] = torch.OutOfMemoryError) -> None:
        self.model = net()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.most, self.error = most, error
        self.sizes: list[int] = []

    def __call__(self, rows: int) -> None:
        self.sizes.append(rows)
        self.optimizer.zero_grad()
        self.model(torch.randn(rows, 16)).square().mean().backward()
        if rows > self.most:
            raise self.error("out of memory. Tried to allocate 2.00 MiB")
        self.optimizer.step()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 31, 64, 99, 100, 1000])
@pytest.mark.parametrize(("multiple_of", "at_least"), [(1, 1), (8, 1), (4, 10)])
@pytest.mark.sample(12)
def test_the_largest_size_is_found(most: int, multiple_of: int, at_least: int) -> None:
    step = Limited(most)
    smallest = -(-at_least // multiple_of) * multiple_of
    if most < smallest:
        with pytest.raises(RuntimeError, match="at_least: expected a size that fits, received"):
            shoestring.find_batch_size(
                step, step.model, step.optimizer, at_most=100, multiple_of=multiple_of, at_least=at_least
            )
        return
    found = shoestring.find_batch_size(
        step, step.model, step.optimizer, at_most=100, multiple_of=multiple_of, at_least=at_least
    )
    assert found.batch_size == min(most, 100) // multiple_of * multiple_of
    assert found.batch_size in [trial.batch_size for trial in found.trials if trial.fits and trial.was_run]
    assert len(found.trials) <= 15
    for trial in found.trials:
        assert trial.fits == (trial.batch_size <= most)
        # Two steps with each size, of which the first one that fails is the last.
        assert step.sizes.count(trial.batch_size) == (2 if trial.fits else 1)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_everything_is_as_before(error: type[BaseException]) -> None:
    step = Limited(20, error)
    step(4)
    weights = [p.detach().clone() for p in step.model.parameters()]
    gradients = [p.grad for p in step.model.parameters()]
    state, random = str(step.optimizer.state_dict()), torch.get_rng_state()
    shoestring.find_batch_size(step, step.model, step.optimizer, at_most=64)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), weights, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(step.model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert str(step.optimizer.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), random)


def test_other_errors_are_raised() -> None:
    step = Limited(20, KeyError)
    with pytest.raises(KeyError):
        shoestring.find_batch_size(step, step.model, step.optimizer, at_most=64)


@pytest.mark.alone
@pytest.mark.fresh  # what malloc keeps of earlier tests splits, so that a step takes up to twice its tensors
def test_memory_of_a_cpu_is_measured() -> None:
    """A row takes 1 MiB here, so a limit of 100 MiB admits a little less than 100 rows, and no step exceeds it."""
    model = net()
    optimizer = AdamW(model.parameters())
    largest = 0

    def step(rows: int) -> None:
        nonlocal largest
        largest = max(largest, rows)
        optimizer.zero_grad()
        hidden = torch.ones(rows, MIB // 4)  # touched, so it is resident
        loss = model(hidden[:, :16]).square().mean()
        loss.backward()
        optimizer.step()

    found = shoestring.find_batch_size(step, model, optimizer, at_most=1024, memory=100 * MIB)
    assert 80 <= found.batch_size <= 102
    # Sizes that the prediction excludes are not run.
    assert largest <= 128
    assert any(not trial.was_run for trial in found.trials)
    ran = [trial for trial in found.trials if trial.was_run and trial.batch_size >= 16]
    for trial in ran:
        assert trial.bytes == pytest.approx(trial.batch_size * MIB, rel=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_most": 0}, "at_most: expected at least 1, received 0"),
        ({"at_most": 7, "multiple_of": 8}, "at_most: expected at least 8, received 7"),
        ({"at_most": 7, "multiple_of": 0}, "multiple_of: expected a number of at least 1, received 0"),
        ({"at_most": 7, "at_least": 0}, "at_least: expected a number of at least 1, received 0"),
        ({"at_most": 7, "memory": 0}, "memory: expected none or a number of bytes above 0, received 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    step = Limited(20)
    with pytest.raises(ValueError, match=f"^find_batch_size: {message}"):
        shoestring.find_batch_size(step, step.model, step.optimizer, **options)


def test_out_of_memory_is_recognised() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**60)
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_advice_is_computed() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    size = 4 * 1_001_000
    advice = shoestring.memory_advice(model, optimizer, batch_size=32, needed=100_000_000)
    assert (advice.weights, advice.gradients) == (2 * size, size)
    assert advice.state == 2 * size + 8  # two moments, and a counter for each of two tensors
    assert advice.activations == 100_000_000 - 5 * size - 8
    assert (
        advice.fitting == 31
    )  # the machine has far more memory, so the failure says that fewer rows are needed
    text = str(advice)
    assert "A micro-batch of 31 rows would have fitted" in text
    assert "8-bit state would save" in text
    assert 'offload="cpu" would take 7.6 MiB' in text
    asked = shoestring.memory_advice(
        model, optimizer, needed=10**8, error=RuntimeError("Tried to allocate 1.50 GiB. GPU 0")
    )
    assert asked.activations == advice.activations + int(1.5 * 2**30)
    assert asked.fitting is None


def test_advice_without_state() -> None:
    model = net()
    advice = shoestring.memory_advice(model)
    assert advice.state == int(2.03 * 17)
    assert advice.activations is None
    assert "as AdamW in 8 bits would have" in str(advice)

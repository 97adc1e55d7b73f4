"""Tests that ``update_batch_norm`` gives the statistics of PyTorch's function, and restores the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from shoestring.optim import update_batch_norm


def model_and_batches() -> tuple[nn.Sequential, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.BatchNorm1d(4 * 16, momentum=None),
        nn.BatchNorm1d(4 * 16, track_running_stats=False),
    )
    model(torch.randn(8, 3, 6, 6))
    model.train()
    model[2].eval()
    model[4].eval()
    return model, [torch.randn(8, 3, 6, 6) * (i + 1) for i in range(3)]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def modes(model: nn.Sequential) -> list[Any]:
    return [m.training for m in model.modules()] + [model[i].momentum for i in (1, 4, 5)]


def test_statistics_are_those_of_torch() -> None:
    model, batches = model_and_batches()
    theirs, before = copy.deepcopy(model), modes(model)
    update_bn(batches, theirs)
    update_batch_norm(((batch, None) for batch in batches), model, device="cpu")
    assert modes(model) == before
    for name, value in statistics(theirs).items():
        assert torch.equal(value, statistics(model)[name]), name
    assert model[1].num_batches_tracked == 3
    exact = torch.stack([model[0](b).double().mean((0, 2, 3)) for b in batches]).mean(0)
    torch.testing.assert_close(model[1].running_mean.double(), exact, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_an_exception_restores_everything() -> None:
    model, batches = model_and_batches()
    before, found = modes(model), statistics(model)

    def broken() -> Iterator[Tensor]:
        yield batches[0]
        raise KeyError

    with pytest.raises(KeyError):
        update_batch_norm(broken(), model)
    with pytest.raises(
        ValueError, match="^update_batch_norm: batches: expected at least one batch, received none$"
    ):
        update_batch_norm([], model)
    assert modes(model) == before
    assert all(torch.equal(value, found[name]) for name, value in statistics(model).items())


def test_a_model_without_batch_norm_is_not_run() -> None:
    update_batch_norm(iter(()), nn.Linear(2, 2))

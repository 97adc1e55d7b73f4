"""Parameters that are trained from a later step on, with each strategy: trained on all ranks alike, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from processes import assert_replicated, run, whole
from shoestring.optim import SGD, Unfreezing

LATER = {"2.*": 0, "0.*": 2}  # the last layer first
NOT_AVERAGED = r"parallelize: model: expected gradients of the parameters that were trained at the beginning, received a model that trains 0\.weight, too"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def _loss(net: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    return net(x).square().mean()


def _optimizer(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, state_format="fp32")


def _alone() -> nn.Module:
    net = _net()
    opt, unfreezing = _optimizer(net.parameters()), Unfreezing(net, LATER)
    for step in range(4):
        for rank in range(2):
            (_loss(net, step, rank) / 2).backward()
        opt.step()
        opt.zero_grad()
        unfreezing.step()
    return net


def _is_one_process(rank: int) -> None:
    """Train in the ways that are possible; all ranks have the weights of one process."""
    expected = dict(_alone().named_parameters())
    for strategy, freezes_first in (
        ("ddp", False),
        ("zero1", False),
        ("zero2", False),
        ("zero2", True),
        ("zero3", False),
        ("zero3", True),
    ):
        net = _net()
        unfreezing = Unfreezing(net, LATER) if freezes_first else None
        report = shoestring.parallelize(net, strategy, find_unused=strategy != "zero3")
        unfreezing = unfreezing or Unfreezing(net, LATER)
        # An optimizer with split steps knows its parameters from the first step on. The later ones need their own.
        splits = strategy in ("zero1", "zero2")
        opts = [_optimizer(net[2].parameters() if splits else net.parameters())]
        for step in range(4):
            if splits and step == 2:
                opts.append(_optimizer(net[0].parameters()))
            _loss(net, step, rank).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
            unfreezing.step()
        for name, p in net.named_parameters():
            assert_replicated(whole(p))
            torch.testing.assert_close(whole(p), expected[name], msg=f"{strategy} {freezes_first} {name}")
        report.undo()


def _is_refused(rank: int) -> None:
    """Parameters whose gradients no rank would average are refused in the first forward that trains them."""
    for strategy in ("ddp", "zero1"):
        for find_unused in (False, True):
            net = _net()
            unfreezing = Unfreezing(net, LATER)
            report = shoestring.parallelize(net, strategy, find_unused=find_unused)
            opt = _optimizer(net[2].parameters())
            for step in range(2):
                _loss(net, step, rank).backward()
                opt.step()
                opt.zero_grad()
                unfreezing.step()
            with pytest.raises(RuntimeError, match=NOT_AVERAGED):
                _loss(net, 2, rank)
            with torch.no_grad():
                _loss(net, 2, rank)
            report.undo()
            _loss(net, 2, rank).backward()
    net = nn.Sequential(nn.Linear(64, 64))
    report = shoestring.parallelize(net, "zero2")
    opt = _optimizer(net.parameters())
    _loss(net, 0, rank).backward()
    opt.step()
    net.append(nn.Linear(64, 64))  # parallelize did not see it
    _optimizer(net[1].parameters())
    with pytest.raises(RuntimeError, match=r"parallelize: zero2: .* received none for 1\.weight"):
        _loss(net, 1, rank)
    report.undo()


@pytest.mark.parametrize("task", [_is_one_process, _is_refused])
def test_unfrozen_parameters(task: Any, tmp_path: Path) -> None:
    run(2, tmp_path, task)

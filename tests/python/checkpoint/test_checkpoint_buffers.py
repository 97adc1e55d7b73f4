"""The second run of a checkpointed function leaves the buffers of modules as they are before it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import checkpoint
from shoestring.checkpoint.measure import metered

MEBIBYTE = 1 << 20
_module: nn.Module  # through_global sets it


class Running(nn.Module):
    """A module that changes a buffer in one of the ways that occur in models."""

    running: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        running = torch.zeros(1, 8)
        if way == "expanded":
            running = torch.zeros(1).expand(8)
        elif way == "transposed":
            running = torch.zeros(8, 2).t()
        self.register_buffer("running", running)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.way == "in place":
            self.running.mul_(0.9).add_(mean)
        elif self.way == "data":
            self.running.data.copy_(0.9 * self.running.data + mean)
        elif self.way == "view":
            self.running[0, 2:].add_(mean[2:])
        elif self.way == "out":
            torch.add(self.running, mean, out=self.running)
        elif self.way == "foreach":
            torch._foreach_add_([self.running], [mean])
        elif self.way == "assigned":
            self.running = 0.9 * self.running + mean
        elif self.way == "data assigned":
            self.running.data = 0.9 * self.running.data + mean
        elif self.way == "both":
            self.running.add_(mean)
            self.running = self.running + 1
        elif self.way == "resized":
            self.running.resize_(len(self.running) + 1, 8)[-1] = mean
        elif self.way == "expanded":
            self.running[0] += 1
        elif self.way == "transposed":
            self.running[1].add_(mean)
        return (x * x).exp().sin()


class Counts(nn.Module):
    """A module with a buffer of many elements, each of which counts the runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        self.table += 1
        return x.tanh()


WAYS = ["in place", "data", "view", "out", "foreach", "assigned", "data assigned", "both", "resized"]
WAYS += ["expanded", "transposed"]


def norm(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 8))


def check_same_state(received: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(received.state_dict().items(), expected.state_dict().values(), strict=True):
        assert one.shape == other.shape and one.stride() == other.stride(), name
        assert torch.equal(one, other), name


def train(module: nn.Module, loss: Callable[[Tensor], Tensor], steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    grads = []
    for _ in range(steps):
        x = torch.randn(9, 8, generator=generator).requires_grad_()
        grads += torch.autograd.grad(loss(x).sum(), [x, *module.parameters()], allow_unused=True)
    return grads


def check_against_plain(module: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Compare gradients and buffers after some steps with those of the same module without a checkpoint."""
    plain = copy.deepcopy(module)
    expected = train(plain, plain)
    for one, other in zip(train(module, functools.partial(loss, module)), expected, strict=True):
        assert torch.equal(one, other)
    check_same_state(module, plain)


# The ways in which a checkpointed function refers to a module.
def through_closure(module: nn.Module, x: Tensor) -> Tensor:
    inner = [module]
    return checkpoint(lambda t: functools.partial(lambda u: inner[0](u))(t), x)


def through_default(module: nn.Module, x: Tensor) -> Tensor:
    def run(t: Tensor, *, module: nn.Module = module) -> Tensor:
        return module(t)

    return checkpoint(run, x)


def through_global(module: nn.Module, x: Tensor) -> Tensor:
    global _module
    _module = module
    return checkpoint(lambda t: _module(t), x)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "module": lambda module, x: checkpoint(module, x),
    "method": lambda module, x: checkpoint(module.forward, x),
    "partial": lambda module, x: checkpoint(functools.partial(type(module).forward, module), x),
    "argument": lambda module, x: checkpoint(lambda of, t: of["module"](t), {"module": module}, x),
    "closure": through_closure,
    "default": through_default,
    "global": through_global,
    "sequential": lambda module, x: shoestring.checkpoint_sequential([module, nn.Identity()], 2, x),
    "tiled": lambda module, x: shoestring.tiled(module, x, tiles=1),
    "whole": lambda module, x: checkpoint(module, x, early_stop=False),
    "keep": lambda module, x: checkpoint(module, x, keep=["products", "aten::native_batch_norm"]),
    "nested": lambda module, x: checkpoint(lambda t: checkpoint(module, t), x),
    "nested in keep": lambda module, x: checkpoint(
        lambda t: checkpoint(module, t, keep=["products"]), x, keep=["aten::tanh"]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_batch_norm_counts_each_batch_once(call: str) -> None:
    check_against_plain(norm(), CALLS[call])


@pytest.mark.parametrize("way", WAYS)
def test_buffers_change_once(way: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), Running(way))
    check_against_plain(module, CALLS["module"])


def test_other_norms_change_once() -> None:
    check_against_plain(norm(momentum=None), CALLS["module"])
    images = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True))
    check_against_plain(images, CALLS["module"])


def test_every_backward_pass_leaves_the_buffers() -> None:
    module = norm()
    plain, x = copy.deepcopy(module), torch.randn(9, 8, requires_grad=True)
    plain(x)
    y = checkpoint(module, x).square().sum()
    for _ in range(2):
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.sum().backward()
    check_same_state(module, plain)


def test_a_second_run_that_raises_leaves_the_buffers() -> None:
    module, runs = Running("in place"), [0]

    def run(x: Tensor) -> Tensor:
        y = module(x)
        runs[0] += 1
        if runs[0] == 2:
            raise RuntimeError("out of luck")
        return y.sin()

    y = checkpoint(run, torch.randn(9, 8, requires_grad=True))
    before = module.running.clone()
    with pytest.raises(RuntimeError, match="out of luck"):
        y.sum().backward()
    assert torch.equal(module.running, before) and before.any()
    module(torch.randn(9, 8))
    assert not torch.equal(module.running, before)  # what comes later changes the buffer


def test_the_buffers_that_autograd_has_saved_stay_valid() -> None:
    """A graph outside of the checkpoint may have saved the buffer before the second run changes it."""
    module, x = norm(), torch.randn(9, 8, requires_grad=True)
    y = checkpoint(module, x)
    z = (module[1].running_mean * x).sum()
    versions = [buffer._version for buffer in module.buffers()]
    y.sum().backward(retain_graph=True)
    z.backward()
    assert [buffer._version for buffer in module.buffers()][:2] == versions[:2]


def test_buffers_that_stay_are_not_copied() -> None:
    module = norm()
    module.register_buffer("table", torch.zeros(4 * MEBIBYTE, dtype=torch.uint8))
    y = checkpoint(lambda t: module(t) + module.table[:8].sum(), torch.randn(9, 8, requires_grad=True))
    with metered(torch.device("cpu")) as meter:
        y.sum().backward()
        assert meter.peak() < MEBIBYTE


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules_in_a_checkpoint(whole: bool) -> None:
    torch.compiler.reset()
    module = norm()
    plain = copy.deepcopy(module)
    compiled: Any = torch.compile(module if whole else module.forward, backend="aot_eager")
    x = torch.randn(9, 8, requires_grad=True)
    for _ in range(2):
        plain(x)
        checkpoint(compiled if whole else lambda t: compiled(t), x).sum().backward()
    check_same_state(module, plain)


def test_a_compiled_checkpoint() -> None:
    torch.compiler.reset()
    module = norm()
    plain, x = copy.deepcopy(module), torch.randn(9, 8, requires_grad=True)
    compiled = torch.compile(lambda t: checkpoint(module, t).sum(), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        plain(x)
        compiled(x).backward()
    check_same_state(module, plain)


def test_models_with_checkpoints() -> None:
    """A plan measures blocks in many runs, which change no buffer either."""
    plain = nn.Sequential(*(norm() for _ in range(3)))
    blocks = ["0", "1", "2"]
    for options in ({}, {"budget": "64MiB", "example": [torch.randn(9, 8)]}):
        model = copy.deepcopy(plain)
        report = shoestring.checkpoint_model(model, blocks, **options)  # type: ignore[arg-type]
        check_same_state(model, plain)
        if not options:
            check_against_plain(model, lambda module, x: module(x))
        report.undo()


@pytest.mark.parametrize("first", ["offload_weights", "checkpoint_model"])
def test_blocks_whose_weights_are_away(first: str, tmp_path: Path) -> None:
    width = 160  # smaller weights would stay
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), Counts(width)) for _ in range(3)]
    model = nn.Sequential(*blocks).requires_grad_(requires_grad=False)
    plain, x = copy.deepcopy(model), torch.randn(9, width, requires_grad=True)
    for name in sorted(["offload_weights", "checkpoint_model"], key=lambda name: name != first):
        if name == "offload_weights":
            shoestring.offload_weights(model, f"nvme:{tmp_path}", blocks=list(model), tables=[])
        else:
            shoestring.checkpoint_model(model, list(model))
    for _ in range(2):
        plain(x)
        model(x).sum().backward()
    check_same_state(model, plain)

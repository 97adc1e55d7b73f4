"""Test activation checkpoints whose function runs a backward pass or contains checkpoints.

The gradients are bit for bit those without checkpoints.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import shoestring
from shoestring import checkpoint

Function = Callable[[Tensor], Tensor]


def inner_gradient(y: Tensor, x: Tensor, how: str) -> Tensor:
    """Return the gradient of y with respect to x.

    ``how`` selects the options of torch.autograd.grad: "create" a graph, "retain" the graph for a second
    call, or "plain".
    """
    if how == "retain":
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        return torch.autograd.grad(y.cos().sum(), x, retain_graph=True)[0]
    return torch.autograd.grad(y.sum(), x, create_graph=how == "create", retain_graph=True)[0]


def levels(depth: int, weights: Sequence[Tensor], how: str, wrap: Callable[[Function], Function]) -> Function:
    """Return a function that runs a backward pass, and for depth > 1 calls such a function of depth - 1.

    The functions of all depths go through ``wrap``, which may add a checkpoint.
    """
    w = weights[depth - 1]

    def run(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x @ w, 0.2).tanh()
        if depth > 1:
            y = levels(depth - 1, weights, how, wrap)(y) + y.sin()
        g = inner_gradient((y @ w).exp(), x, how)
        return (g @ w).sigmoid() * y.cos() + (x @ w) * g

    return wrap(run)


KEEP = [[], ["aten::exp"], ["products"], ["aten::mm", "aten::native_dropout"]]


@pytest.mark.parametrize("how", ["plain", "create", "retain"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.sample(8)
def test_backward_inside(seed: int, depth: int, early_stop: bool, how: str) -> None:
    weights = [(torch.randn(4, 4) * 0.5).requires_grad_() for _ in range(depth)]
    x = torch.randn(4, 4, requires_grad=True)
    of = [x, *weights]

    def gradients(fn: Function, passes: int = 1) -> list[Tensor]:
        torch.manual_seed(seed)
        loss = (fn(x) * x).sum()
        return [g for i in range(passes) for g in torch.autograd.grad(loss, of, retain_graph=i + 1 < passes)]

    def second(fn: Function) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), of)

    plain = levels(depth, weights, how, lambda fn: fn)
    expected = [*gradients(plain, 2), *second(plain)]
    # Each further level of nesting multiplies the runs of the innermost function. So depth 3 tests only half
    # of the values of `keep` (operators whose results a checkpoint keeps).
    for keep in KEEP if depth < 3 else KEEP[::2]:
        wrap = functools.partial(functools.partial, checkpoint, early_stop=early_stop, keep=keep)
        checkpointed = levels(depth, weights, how, wrap)
        for one, other in zip([*gradients(checkpointed, 2), *second(checkpointed)], expected, strict=True):
            assert torch.equal(one, other), f"keep={keep}: {(one - other).abs().max().item()}"


def test_random_numbers_go_on_as_without(seed: int) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for early_stop, keep in itertools.product([True, False], [[], ["aten::exp"]]):
        after = []
        checkpointed = functools.partial(functools.partial, checkpoint, early_stop=early_stop, keep=keep)
        for wrap in (lambda fn: fn, checkpointed):
            torch.manual_seed(seed)
            levels(2, [x, x], "create", wrap)(x).sum().backward()
            after.append(torch.randn(3))
        assert torch.equal(*after)


def test_another_second_run_is_still_an_error() -> None:
    x, runs = torch.randn(4, 4, requires_grad=True), [0]

    def differs(first: Function, later: Function) -> Function:
        def run(x: Tensor) -> Tensor:
            runs[0] += 1
            y = x.exp().sin()
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            # Run 1 of this function is the forward pass, and run 2 recomputes it for the backward pass
            # inside. Later runs recompute it for the outer backward pass.
            return (first if runs[0] <= 2 else later)(y * g)

        return run

    more, less = (lambda t: t.exp().sin().cos()), (lambda t: t.exp())
    for fn, early_stop, message in (
        (differs(less, more), False, "saved 4 tensors in forward and 6 in backward"),
        (differs(more, less), False, "saved 6 tensors in forward and 4 in backward"),
        (differs(more, less), True, "saved 6 tensors in forward and 4 in backward"),
        (differs(less, lambda t: t[:2].exp()), False, r"\[4, 4\] on cpu in forward and is float32\[2, 4\]"),
    ):
        runs[0] = 0
        y = checkpoint(fn, x, early_stop=early_stop)
        with pytest.raises(CheckpointError, match=message):
            y.sum().backward()


def test_a_function_that_catches_exceptions() -> None:
    x = torch.randn(4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = x.exp()
        try:
            return y.sin()  # sin saves y, the last tensor that `run` saves
        except Exception:
            return y.cos().tanh()

    received, expected = (torch.autograd.grad(y.sum(), x) for y in (checkpoint(run, x), run(x)))
    assert torch.equal(received[0], expected[0])


LIBRARY = torch.library.Library("checkpoint_inside", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
computed = [0]


def _twice(x: Tensor) -> Tensor:
    computed[0] += 1
    return x * 2


LIBRARY.impl("twice", _twice, "CPU")


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.checkpoint_inside.twice(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_keeps_in_spite_of_a_backward_pass_inside(seed: int) -> None:
    x = torch.randn(4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = shoestring.tag_activation(_Twice.apply(x.sin()), "tagged")
        (g,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        return _Twice.apply(y.sin() * g).exp()

    expected = torch.autograd.grad(run(x).sum(), x)[0]
    kept = ["checkpoint_inside::twice"]
    # The checkpointed function calls the operator `twice` two times in forward. The backward pass inside the
    # function recomputes the first of these calls. Without early_stop, it also recomputes the second call,
    # whose result is not kept yet. The outer backward pass recomputes both calls unless their results are
    # kept.
    cases = (([], True, 5), ([], False, 6), (kept, True, 2), (kept, False, 3), (["tagged"], True, 3))
    for keep, early_stop, calls in cases:
        computed[0] = 0
        received = torch.autograd.grad(checkpoint(run, x, keep=keep, early_stop=early_stop).sum(), x)[0]
        assert torch.equal(received, expected) and computed[0] == calls, (keep, early_stop, computed[0])


def test_outer_checkpoints_do_not_see_the_runs_of_inner_ones(seed: int) -> None:
    """The recomputation of a checkpoint inside another one does not count as a run of the outer function.

    The outer function starts the backward pass of the inner checkpoint only in its first run. So the inner
    function is recomputed while the outer one is recorded, but not while the outer one is recomputed.
    """
    leaf = torch.randn(4, requires_grad=True)
    pending = checkpoint(lambda t: _Twice.apply(t.sin()).exp(), leaf)
    passes = [0]

    def run(x: Tensor) -> Tensor:
        passes[0] += 1
        if passes[0] == 1:
            torch.autograd.grad(pending.sum(), leaf)
        return _Twice.apply(x.cos()).exp()

    received = torch.autograd.grad(checkpoint(run, leaf, keep=["checkpoint_inside::twice"]).sum(), leaf)[0]
    expected = torch.autograd.grad(_Twice.apply(leaf.cos()).exp().sum(), leaf)[0]
    assert torch.equal(received, expected)


class _Mark:
    pass


class _Scaled(torch.autograd.Function):
    """An autograd function that saves a frozen weight, and reads the weight's Python attribute ``scale``."""

    seen: list[Tensor] = []
    marks: list[weakref.ref[_Mark]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        y = x * weight.scale
        ctx.mark = _Mark()  # this object lives as long as the autograd node
        _Scaled.marks.append(weakref.ref(ctx.mark))
        ctx.save_for_backward(weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        weight, _ = ctx.saved_tensors
        _Scaled.seen.append(weight)
        return grads[0] * weight.scale, None


class _Weight(nn.Parameter):
    pass


@pytest.mark.parametrize("given", [True, False], ids=["argument", "captured"])
@pytest.mark.parametrize("weight", [
    nn.Parameter(torch.ones(4), requires_grad=False),
    _Weight(torch.ones(4), requires_grad=False),
    torch.ones(4, dtype=torch.uint8)], ids=["parameter", "subclass", "uint8"])  # fmt: skip
def test_frozen_tensors_keep_their_attributes(weight: Any, given: bool) -> None:
    weight.scale = 3.0
    x = torch.randn(4, requires_grad=True)
    if given:
        run: Callable[..., Tensor] = lambda t, w: _Scaled.apply(_Scaled.apply(t.sin(), w), w)  # noqa: E731
        nested = [
            lambda: checkpoint(run, x, weight),
            lambda: checkpoint(lambda t, w: checkpoint(run, t, w), x, weight),
        ]
        plain = run(x, weight)
    else:
        one: Function = lambda t: _Scaled.apply(_Scaled.apply(t.sin(), weight), weight)  # noqa: E731
        nested = [lambda: checkpoint(one, x), lambda: checkpoint(lambda t: checkpoint(one, t), x)]
        plain = one(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    for make in nested:
        _Scaled.seen.clear()
        assert torch.equal(torch.autograd.grad(make().sum(), x)[0], expected)
        assert len(_Scaled.seen) == 2 and all(one is weight for one in _Scaled.seen)
    _Scaled.seen.clear()


def test_no_cycle_holds_what_the_second_run_made() -> None:
    """A recomputed output does not keep its own autograd node alive, even if that node saves the output."""
    weight: Any = torch.ones(4)
    weight.scale = 3.0
    x = torch.randn(4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = _Scaled.apply(x.sin(), weight)
        (g,) = torch.autograd.grad(y.exp().sum(), x, retain_graph=True)
        return y.cos() * g

    gc.disable()
    try:
        for early_stop in (True, False):
            _Scaled.marks.clear()
            checkpoint(run, x, early_stop=early_stop).sum().backward()
            _Scaled.seen.clear()
            assert len(_Scaled.marks) > 2 and all(mark() is None for mark in _Scaled.marks)
    finally:
        gc.enable()

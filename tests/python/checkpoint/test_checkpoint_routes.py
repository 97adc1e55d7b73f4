"""Checkpoints keep which experts a token has, so that a recomputation never routes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shoestring

EXPERTS, TOP_K = 8, 2


class Calls(TorchDispatchMode):
    """Count the calls of operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Layer:
    """A router whose logits are moved, in each run after the first, by as much as rounding might."""

    def __init__(self, experts: int = EXPERTS) -> None:
        self.weight = torch.randn(experts, 4).div(2).round().requires_grad_()
        self.runs = 0
        self.indices: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, self.weight)
        if self.runs % 2 == 1:
            logits = logits + 1e-6 * torch.randn_like(logits)
        self.runs += 1
        route = shoestring.moe_route(logits, TOP_K, renormalize=True)
        order = shoestring.moe_sort(route.index, EXPERTS).order
        self.indices.append(route.index)
        rows = x[order // TOP_K] * route.weight.flatten()[order].unsqueeze(-1)
        return torch.exp(0.1 * rows).sum() + 0.01 * route.balance + 0.01 * route.z


def tied(count: int) -> Tensor:
    """Return tokens of few integers, for which many experts have equal logits."""
    return torch.randint(-1, 2, (count, 4)).float()


def test_ties_rank_the_same_in_both_runs() -> None:
    """The logits of the second run differ by rounding, which ranks equal logits in another way."""
    layer, changed = Layer(), 0
    for _ in range(300):
        x = tied(33).requires_grad_()
        y = shoestring.checkpoint(layer, x)
        y.backward()
        first, second = layer.indices
        assert torch.equal(first, second)
        logits = torch.nn.functional.linear(x, layer.weight)
        moved = shoestring.moe_route(logits + 1e-6 * torch.randn_like(logits), TOP_K)
        changed += int(not torch.equal(moved.index, first))
        layer.indices.clear()
    assert changed > 250  # without the kept choice, nearly every batch would differ


def test_a_recomputation_calls_neither_router_nor_sort() -> None:
    layer = Layer()
    x = tied(33).requires_grad_()
    with Calls() as first:
        y = shoestring.checkpoint(layer, x)
    assert first.counts["moe_route"] == first.counts["moe_sort"] == 1
    with Calls() as later:
        y.backward()
    assert layer.runs == 2
    assert "linear" in later.counts or "mm" in later.counts or "addmm" in later.counts
    assert "moe_route" not in later.counts and "moe_sort" not in later.counts


@pytest.mark.parametrize("keep", [[], ["products"], ["shoestring::moe_route"]], ids=str)
def test_gradients_are_those_without_a_checkpoint(keep: list[str]) -> None:
    layer = Layer()

    def plain(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for each in (x, x.square() - 0.3):
            layer.runs = 0  # a run whose logits do not move
            total = total + layer(each)
        return total

    x = tied(33).requires_grad_()
    expected = torch.autograd.grad(plain(x), [x, layer.weight])
    y = shoestring.checkpoint(plain, x, keep=keep)
    for _ in range(2):  # two backward passes over one graph
        found = torch.autograd.grad(y, [x, layer.weight], retain_graph=True)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def nested(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def outer(x: Tensor) -> Tensor:
        return shoestring.checkpoint(inner, x) * shoestring.checkpoint(inner, 2 * x)

    return outer


def test_nested_checkpoints_route_once() -> None:
    layer = Layer()
    x = tied(33).requires_grad_()
    with Calls() as first:
        y = shoestring.checkpoint(nested(layer), x)
    with Calls() as later:
        y.backward()
    assert first.counts["moe_route"] == 2 and "moe_route" not in later.counts
    assert len(layer.indices) >= 4
    firsts, seconds = layer.indices[0], layer.indices[1]
    assert all(torch.equal(index, firsts) or torch.equal(index, seconds) for index in layer.indices)


def test_a_backward_pass_inside_routes_anew() -> None:
    """The results of a backward pass inside the function belong to no run of the function."""
    layer = Layer()

    def inside(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        layer.runs = 0
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(shoestring.checkpoint(layer, inner), inner)
        layer.runs = 0
        return layer(x + gradient)

    x = tied(9).requires_grad_()
    expected = torch.autograd.grad(inside(x), x)
    found = torch.autograd.grad(shoestring.checkpoint(inside, x), x)
    assert torch.equal(found[0], expected[0])


def test_other_logits_are_refused() -> None:
    """A function that routes other tokens in the second run gets an error, not the experts of other tokens."""
    sizes = iter([8, 6])

    def changing(x: Tensor) -> Tensor:
        return shoestring.moe_route(x[: next(sizes)] * 2, TOP_K).weight.exp().sum()

    y = shoestring.checkpoint(changing, torch.randn(10, EXPERTS, requires_grad=True))
    with pytest.raises(RuntimeError, match="moe_route is kept"):
        y.backward()


def test_a_failed_run_leaves_nothing_behind() -> None:
    def failing(x: Tensor) -> Tensor:
        shoestring.moe_route(x, TOP_K)
        raise ValueError("stop")

    x = torch.randn(10, EXPERTS, requires_grad=True)
    with pytest.raises(ValueError, match="stop"):
        shoestring.checkpoint(failing, x)
    with Calls() as calls:
        shoestring.moe_route(x, TOP_K)
    assert calls.counts["moe_route"] == 1


def test_tapes_are_used_again() -> None:
    from shoestring.core import kept_calls

    layer, x = Layer(), tied(9).requires_grad_()
    for _ in range(3):
        shoestring.checkpoint(layer, x).backward()
        free = len(kept_calls._unused_tapes)
    for _ in range(5):
        shoestring.checkpoint(layer, x).backward()
    assert len(kept_calls._unused_tapes) == free >= 2

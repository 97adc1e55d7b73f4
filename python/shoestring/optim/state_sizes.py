"""Compute the sizes of an optimizer's state before it is allocated; parameters may be on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.low_rank import LowRankOptimizer
from shoestring.optim.state_layout import Kind, Part, blocks


@dataclass(frozen=True)
class StateArena:
    """Sizes of one arena: the buffer that holds the optimizer state of parameters with equal state format."""

    parts: list[Part]
    blocks: list[int]  # number of blocks of 256 elements, for each parameter
    core: Any  # the OptimizerCore that steps the parameters
    params: list[Tensor]
    extras: list[int]  # bytes of each parameter's state outside of the arena, without the step count

    @property
    def per_block(self) -> int:
        """Bytes of optimizer state per block of 256 elements."""
        return sum(part.per_block * part.dtype.itemsize for part in self.parts)

    def bytes(self, total: int | None = None) -> dict[str, int]:
        """Return the bytes of each part of the state of `total` blocks (None: all blocks of the arena)."""
        count = sum(self.blocks) if total is None else total
        return {part.name: count * part.per_block * part.dtype.itemsize for part in self.parts}


@dataclass(frozen=True)
class State:
    """Sizes of the state that an optimizer keeps once every trained parameter has had a gradient."""

    arenas: list[StateArena]
    # name -> bytes of state outside the arenas: step counts, and fp32 tensors of the update rule
    rest: dict[str, int]

    def bytes(self) -> dict[str, int]:
        """Return a dict from the name of each part of the state to its bytes."""
        return total(*(arena.bytes() for arena in self.arenas), self.rest)


def optimizer_state(
    optimizer: LowMemoryOptimizer | LowRankOptimizer, numel: Callable[[Tensor], int] = Tensor.numel
) -> State:
    """Return the sizes of the state that an optimizer will hold; the state need not be allocated yet.

    ``numel`` returns the number of a parameter's elements that this process steps.
    """
    if isinstance(optimizer, LowRankOptimizer):
        return _low_rank_state(optimizer, numel)
    arenas: list[StateArena] = []
    rest: list[dict[str, int]] = []
    for group in optimizer.param_groups:
        members: dict[Kind, list[Tensor]] = {}
        for p in group["params"]:
            if p.requires_grad:
                members.setdefault(optimizer._kind(p, group), []).append(p)
                rest.append({"step": 4})
                rest.append(_extras(optimizer, p, numel))
        for params in members.values():
            found = optimizer._parts(params[0], group)
            sizes = [blocks(numel(p)) for p in params]
            extras = [sum(_extras(optimizer, p, numel).values()) for p in params]
            arenas.append(StateArena(found, sizes, optimizer._core, params, extras))
    return State(arenas, total(*rest))


def _extras(optimizer: LowMemoryOptimizer, param: Tensor, numel: Callable[[Tensor], int]) -> dict[str, int]:
    """Return the bytes of a parameter's state outside of the arenas, of which processes split some tensors."""
    split = optimizer._elementwise(param)
    shapes = optimizer._extra(param).items()
    return {name: 4 * (numel(param) if name in split else math.prod(shape)) for name, shape in shapes}


def _low_rank_state(optimizer: LowRankOptimizer, numel: Callable[[Tensor], int]) -> State:
    """Return the sizes of the projections, and of the base optimizer's state.

    Each process has those of whole matrices.
    """
    base = optimizer._virtual.base
    assert isinstance(base, LowMemoryOptimizer)
    kept = optimizer._method.kept
    own = [{kept: like.nbytes} for each in optimizer._virtual.projected for _, like in each]
    virtual = set(optimizer._virtual.of.values())
    state = optimizer_state(base, lambda p: p.numel() if p in virtual else numel(p))
    return State(state.arenas, total(state.rest, *own))


def total(*several: dict[str, int]) -> dict[str, int]:
    """Add up dicts from names to sizes; leave out names whose sum is zero."""
    found: dict[str, int] = {}
    for each in several:
        for name, size in each.items():
            found[name] = found.get(name, 0) + size
    return {name: size for name, size in found.items() if size}

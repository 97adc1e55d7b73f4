"""Where the state of optimizers lies: flat arenas that an operator steps in one call, and a parameter's views of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoestring.optim.offload import OffloadedState
from shoestring.optim.sharded import Shards, is_dtensor, local
from shoestring.quantization.quantize_8bit import STATE_BLOCK
from shoestring.quantization.quantize_state_4bit import GROUP_4BIT

STATES = ("8bit", "4bit", "bf16", "fp32")
WEIGHTS = ("plain", "stochastic", "remainder")


@dataclass(frozen=True)
class Moment:
    """One of a rule's running means: its name in a state dict, and whether it may be negative.

    long: it changes by less in a step than codes are apart, and where others are codes it is bf16.
    """

    name: str
    signed: bool
    long: bool = False

    def kept_as(self, state: str) -> str:
        """How it is kept where the optimizer's state is this."""
        return "bf16" if self.long and state in ("8bit", "4bit") else state


@dataclass(frozen=True)
class Kind:
    """What the parameters of an arena have in common."""

    state: str
    remainder: bool
    device: torch.device  # where they are stepped
    shards: Shards | None
    source: torch.device  # where they lie


def blocks(size: int) -> int:
    """The number of blocks that the state of so many elements takes."""
    return -(-size // STATE_BLOCK)


@dataclass(frozen=True)
class Part:
    """A kind of entry: its dtype, and what it takes of an arena for each block of 256 elements."""

    name: str
    dtype: torch.dtype
    per_block: int
    shaped: bool  # as the parameter; else flat, whole blocks

    def size(self, param: Tensor) -> int:
        """Elements of a parameter's view."""
        return param.numel() if self.shaped else blocks(param.numel()) * self.per_block

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """The shape of a parameter's view."""
        return tuple(param.shape) if self.shaped else (self.size(param),)


def parts(moments: Iterable[Moment], state: str, remainder: bool) -> list[Part]:
    """The entries of a parameter, but for its step, in the order of the operators' arguments."""
    found = []
    for m in moments:
        own = m.kept_as(state)
        if own in ("fp32", "bf16"):
            dtype = torch.float32 if own == "fp32" else torch.bfloat16
            found.append(Part(m.name, dtype, STATE_BLOCK, True))
        elif own == "8bit":
            found.append(Part(m.name, torch.uint8, STATE_BLOCK, True))
            found.append(Part(f"{m.name}_scale", torch.float32, 1, False))
        else:
            found.append(Part(m.name, torch.uint8, STATE_BLOCK // 2, False))
            found.append(Part(f"{m.name}_scale", torch.float32, STATE_BLOCK // GROUP_4BIT[m.signed], False))
    if remainder:
        found.append(Part("weight_remainder", torch.int16, STATE_BLOCK, True))
    return found


@dataclass
class Arena:
    """The state of a group's parameters of one kind, each beginning at a multiple of a block."""

    kind: Kind
    params: list[Tensor]
    step: Tensor
    values: dict[str, Tensor]  # by the names of the operator's arguments
    numbers: list[int]  # of the parameters among all of the optimizer, for random bits
    begins: list[int] = field(init=False)  # in blocks, of each parameter
    is_sharded: bool = field(init=False)  # whether any is a DTensor: to ask each takes as long as to step it
    accumulated: Tensor | None = None
    offloaded: OffloadedState | None = None  # the state, where it is not in values
    start: int = 0  # of the parameters among those of offloaded
    stepped: Tensor | None = None  # step, while a step of what is offloaded is under way
    parts: list[Part] = field(default_factory=list)
    part: tuple[int, int] | None = (
        None  # of a piece: the first parameter's first block, and the number of blocks
    )
    # Where the CPU steps what lies on a device:
    host: Any = None  # HostParams (csrc/offload/host_params.h): parameters and gradients in host memory
    weights: list[Tensor] | None = None  # there
    has_fetched: bool = False  # gradients of the step that is under way
    next_param: int = 0  # of a step that failed: the first that has not been stepped

    def __post_init__(self) -> None:
        self.is_sharded = any(map(is_dtensor, self.params))
        if self.offloaded is not None and len(self.params) == len(self.offloaded.begins()):
            self.begins = self.offloaded.begins()
            return
        self.begins, block = [], 0
        for p in self.params:
            self.begins.append(block)
            block += blocks(local(p).numel())

    def device_params(self) -> list[Tensor]:
        """The parameters, of DTensors what this process has."""
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def local_params(self) -> list[Tensor]:
        """What an operator steps."""
        return self.device_params() if self.weights is None else self.weights

    def accumulated_views(self, dtype: torch.dtype) -> list[Tensor]:
        """A gradient's sum for each parameter, in its shape; zeros, until something is added."""
        if self.accumulated is None:
            count = self.total
            self.accumulated = torch.zeros(count * STATE_BLOCK, dtype=dtype, device=self.kind.device)
        return [
            self.accumulated[begin * STATE_BLOCK :][: local(p).numel()].view(local(p).shape)
            for p, begin in zip(self.params, self.begins, strict=True)
        ]

    @property
    def total(self) -> int:
        """Its blocks."""
        if self.offloaded is not None:
            result: int = self.offloaded.total()
            return result
        return sum(blocks(local(p).numel()) for p in self.params)

    def blocks_of(self, arena: Tensor, index: int, first_block: int, count: int) -> Tensor:
        """Elements of a flat tensor with 256 for each block, from a block of a parameter on."""
        begin = self.begins[index] + first_block
        return arena[begin * STATE_BLOCK : (begin + count) * STATE_BLOCK]

    def piece(self, own: slice, first_block: int, offset: int, count: int, values: list[Tensor]) -> "Arena":
        """Some of the parameters, whose state lies at block ``offset`` of ``values``; of the steps a copy."""
        found = {
            part.name: value[offset * part.per_block : (offset + count) * part.per_block]
            for part, value in zip(self.parts, values, strict=True)
        }
        piece = Arena(self.kind, self.params[own], self.step[own].clone(), found, self.numbers[own])
        whole = first_block == 0 and count == piece.total
        piece.part = None if whole else (first_block, count)
        return piece

    def run(self, first: int, last: int, moments: tuple[Moment, ...]) -> "Arena":
        """The part of some parameters, side by side, as an arena of its own."""
        begin = self.begins[first]
        count = self.begins[last - 1] + blocks(local(self.params[last - 1]).numel()) - begin
        slices = {
            part.name: self.values[part.name][begin * part.per_block :][: count * part.per_block]
            for part in parts(moments, self.kind.state, self.kind.remainder)
        }
        arena = Arena(
            self.kind, self.params[first:last], self.step[first:last], slices, self.numbers[first:last]
        )
        arena.offloaded, arena.start, arena.parts = self.offloaded, self.start + first, self.parts
        if self.weights is not None:
            arena.weights = self.weights[first:last]
        if self.accumulated is not None:
            arena.accumulated = self.accumulated[begin * STATE_BLOCK :][: count * STATE_BLOCK]
        return arena


def offloaded_bytes(
    params: list[Tensor], kind: Kind, moments: tuple[Moment, ...], offload: Any, splits: bool
) -> int:
    """Return the bytes that the state of parameters takes in the place it is offloaded to."""
    result: int = offload.state_bytes(*_state_shape(params, kind, moments, splits))
    return result


def _state_shape(
    params: list[Tensor], kind: Kind, moments: tuple[Moment, ...], splits: bool
) -> tuple[list[Tensor], list[int], list[int], bool]:
    every = parts(moments, kind.state, kind.remainder)
    like = [torch.empty(0, dtype=part.dtype, device="cpu") for part in every]
    sizes = [blocks(local(p).numel()) for p in params]
    return like, [part.per_block for part in every], sizes, splits and kind.device.type == "cpu"


def make_arena(
    members: dict[int, Tensor],
    kind: Kind,
    moments: tuple[Moment, ...],
    state: dict[Tensor, Any],
    offload: Any = None,
    splits: bool = True,
    on_host: bool = False,
) -> tuple[Arena, dict[Tensor, dict[str, Any]]]:
    """Make an arena of parameters, by number, and their state: views of the arena that hold what ``state`` has of them.

    splits: whether the operator steps parts of parameters. on_host: whether the CPU steps them, in host memory.
    """
    params = list(members.values())
    every = parts(moments, kind.state, kind.remainder)
    step = torch.zeros(len(params), dtype=torch.float32, device=kind.device)
    if offload is None or on_host:
        total = sum(blocks(local(p).numel()) for p in params)
        values = {p.name: torch.zeros(total * p.per_block, dtype=p.dtype, device=kind.device) for p in every}
        arena = Arena(kind, params, step, values, list(members))
        if on_host:
            arena.host = torch.classes.shoestring.HostParams(offload, arena.device_params())
            arena.weights = arena.host.weights()
    else:
        offloaded = torch.classes.shoestring.OffloadedState(
            offload, *_state_shape(params, kind, moments, splits)
        )
        values = {part.name: value for part, value in zip(every, offloaded.values(), strict=True)}
        arena = Arena(kind, params, step, values, list(members), offloaded=offloaded, parts=every)
    states = {}
    for i, (p, begin) in enumerate(zip(params, arena.begins, strict=True)):
        own = local(p)
        views = {"step": step[i]}
        for part in every:
            view = values[part.name][begin * part.per_block :][: part.size(own)]
            views[part.name] = view.view(part.shape(own))
        for name, old in state.get(p, {}).items():
            if name in views:
                views[name].copy_(old)
            else:  # maybe the caller's, and on another device
                views[name] = old.to(kind.device, copy=True) if isinstance(old, Tensor) else old
        states[p] = views
    return arena, states


@dataclass
class Layout:
    """A group's arenas, and the parameters that have never had a gradient."""

    arenas: list[Arena]
    absent: list[Tensor]

    def holds(self, params: list[Tensor], has_gradient: Callable[[Tensor], bool]) -> bool:
        """Whether it still is the layout of this group."""
        count = len(self.absent) + sum(len(arena.params) for arena in self.arenas)
        return count == len(params) and not any(has_gradient(p) for p in self.absent)

"""Arenas: flat tensors that hold the optimizer state of many parameters. One operator call steps them all."""

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
ROUNDINGS = ("nearest", "stochastic", "remainder")


@dataclass(frozen=True)
class Moment:
    """A running mean that an update rule keeps: its name in a state dict, and whether it may be negative.

    long: the mean moves less per step than one quantisation level. If the other means are stored as 8-bit or
    4-bit codes, this one is stored in bf16.
    """

    name: str
    signed: bool
    long: bool = False

    def kept_as(self, state: str) -> str:
        """Return the format in which this moment is stored, given the optimizer's option ``state_format``."""
        return "bf16" if self.long and state in ("8bit", "4bit") else state


@dataclass(frozen=True)
class Kind:
    """The properties that all parameters of an arena share, such as the format of their state."""

    state: str
    remainder: bool
    device: torch.device  # the device that steps the parameters
    shards: Shards | None
    source: torch.device  # the device that holds the parameters


def blocks(size: int) -> int:
    """Return the number of 256-element blocks that the state of a parameter with ``size`` elements takes."""
    return -(-size // STATE_BLOCK)


@dataclass(frozen=True)
class Part:
    """A tensor in a parameter's state: its name, dtype and elements per 256 elements of the parameter."""

    name: str
    dtype: torch.dtype
    per_block: int
    # Whether this state tensor has the parameter's shape. Otherwise it is flat and covers whole blocks of 256
    # elements.
    shaped: bool

    def size(self, param: Tensor) -> int:
        """Return the number of elements that this state tensor has for the parameter."""
        return param.numel() if self.shaped else blocks(param.numel()) * self.per_block

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape that this state tensor has for the parameter."""
        return tuple(param.shape) if self.shaped else (self.size(param),)


def parts(moments: Iterable[Moment], state: str, remainder: bool) -> list[Part]:
    """Return a parameter's state tensors in the order of the operators' arguments, without the step count."""
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
    """The state of parameters of a group that share a ``Kind`` (format and devices), in flat tensors.

    The state of each parameter starts at a multiple of 256 elements.
    """

    kind: Kind
    params: list[Tensor]
    step: Tensor
    values: dict[str, Tensor]  # the state tensors; the keys are the names of the operator's arguments
    # For each parameter, its position among all parameters of the optimizer, on which its random bits depend.
    numbers: list[int]
    # For each parameter, the index of the 256-element block of the arena at which its state begins.
    begins: list[int] = field(init=False)
    # Whether any parameter of the arena is a DTensor. Cached, since the check takes as long as the step of a
    # parameter.
    is_sharded: bool = field(init=False)
    accumulated: Tensor | None = None  # flat gradient sums, one element per element of the arena
    # The state of the arena if it is stored on the host or a disk and copied to the device in chunks.
    offloaded: OffloadedState | None = None
    # Index of this arena's first parameter among the parameters whose state ``offloaded`` holds.
    start: int = 0
    # The new step counts of the parameters, while a step of offloaded state is unfinished.
    stepped: Tensor | None = None
    parts: list[Part] = field(default_factory=list)
    # If the arena holds only a part of its first parameter: the part's first 256-element block, and its
    # number of blocks.
    part: tuple[int, int] | None = None
    # The fields host, weights, has_fetched and next_param are used with offload="cpu", where the CPU steps a
    # device's parameters.
    host: Any = None  # HostParams (csrc/offload/host_params.h) holds parameters and gradients in host memory
    weights: list[Tensor] | None = None  # copies of the parameters in host memory
    has_fetched: bool = False  # whether the gradients of the current step are in host memory
    next_param: int = 0  # index of the first parameter that a failed step has not stepped

    def __post_init__(self) -> None:
        self.is_sharded = any(map(is_dtensor, self.params))
        if self.offloaded is not None and len(self.params) == len(self.offloaded.begins()):
            self.begins = self.offloaded.begins()
            return
        self.begins, block = [], 0
        for p in self.params:
            self.begins.append(block)
            block += blocks(local(p).numel())

    def check_place(self, optimizer: str) -> None:
        """Raise RuntimeError if a parameter has left the device for which its state was made."""
        for p in self.device_params():
            if p.device != self.kind.source:
                raise RuntimeError(
                    f"{optimizer}: params: expected all parameters on {self.kind.source}, for which their state was "
                    f"made, received one on {p.device}. Make the optimizer after the model has been moved."
                )

    def device_params(self) -> list[Tensor]:
        """Return the parameters whose state this arena holds, on the device where the model holds them.

        A DTensor is replaced by this process's shard.
        """
        return [local(p) for p in self.params] if self.is_sharded else self.params

    def local_params(self) -> list[Tensor]:
        """Return the tensors that the optimizer's operator steps.

        These are the parameters, or with offload="cpu" their copies in host memory.
        """
        return self.device_params() if self.weights is None else self.weights

    def accumulated_views(self, dtype: torch.dtype) -> list[Tensor]:
        """Return a tensor for each parameter, of its shape, that sums gradients over micro-batches.

        New sums are zero.
        """
        if self.accumulated is None:
            count = self.total
            self.accumulated = torch.zeros(count * STATE_BLOCK, dtype=dtype, device=self.kind.device)
        return [
            self.accumulated[begin * STATE_BLOCK :][: local(p).numel()].view(local(p).shape)
            for p, begin in zip(self.params, self.begins, strict=True)
        ]

    @property
    def total(self) -> int:
        """The number of 256-element blocks of the arena."""
        if self.offloaded is not None:
            result: int = self.offloaded.total()
            return result
        return sum(blocks(local(p).numel()) for p in self.params)

    def blocks_of(self, arena: Tensor, index: int, first_block: int, count: int) -> Tensor:
        """Return a slice of a flat tensor that has 256 elements per block.

        The slice starts at block ``first_block`` of parameter ``index`` and covers ``count`` blocks.
        """
        begin = self.begins[index] + first_block
        return arena[begin * STATE_BLOCK : (begin + count) * STATE_BLOCK]

    def piece(self, own: slice, first_block: int, offset: int, count: int, values: list[Tensor]) -> "Arena":
        """Return an arena of the parameters ``self.params[own]``, with views of the state tensors ``values``.

        The new arena covers ``count`` blocks of 256 elements, from block ``first_block`` of its first
        parameter on. The state of these blocks starts at block ``offset`` of ``values``. The step counts are
        copied.
        """
        found = {
            part.name: value[offset * part.per_block : (offset + count) * part.per_block]
            for part, value in zip(self.parts, values, strict=True)
        }
        piece = Arena(self.kind, self.params[own], self.step[own].clone(), found, self.numbers[own])
        whole = first_block == 0 and count == piece.total
        piece.part = None if whole else (first_block, count)
        return piece

    def run(self, first: int, last: int, moments: tuple[Moment, ...]) -> "Arena":
        """Return an arena of the parameters ``first`` to ``last - 1``.

        Its tensors are views of this arena.
        """
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
    """Return the bytes that the optimizer state of ``params`` takes in host memory or in the offload file."""
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
    """Allocate an arena for parameters. Return it with the state dict of each parameter.

    The tensors in the state dicts are views of the arena. If ``state`` already holds values of a parameter,
    they are copied into the views.

    Args:
        members: the parameters; the keys are their positions among all parameters of the optimizer.
        kind: the state format, devices and sharding that the parameters share.
        moments: the running means that the update rule keeps.
        state: the old state entries of the parameters, if any.
        offload: the optimizer's Offload object for the parameters' device; None without offload.
        splits: whether the optimizer's operator can step a part of a parameter.
        on_host: whether the CPU steps the parameters (offload="cpu"); their weights are then copied to host
            memory.
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
            # The arena has no place for this state tensor: copy the tensor, since the caller may own it.
            else:
                views[name] = old.to(kind.device, copy=True) if isinstance(old, Tensor) else old
        states[p] = views
    return arena, states


@dataclass
class Layout:
    """The arenas (flat state tensors) of a parameter group, and its parameters without state.

    A parameter gets state with its first gradient.
    """

    arenas: list[Arena]
    absent: list[Tensor]

    def holds(self, params: list[Tensor], has_gradient: Callable[[Tensor], bool]) -> bool:
        """Return whether the arenas still hold the state of all parameters that need state.

        They do not if a parameter was added to the group, or if a parameter has its first gradient.
        """
        count = len(self.absent) + sum(len(arena.params) for arena in self.arenas)
        return count == len(params) and not any(has_gradient(p) for p in self.absent)

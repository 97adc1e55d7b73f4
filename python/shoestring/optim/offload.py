"""Optimizer state where the device has no room for it: how a step takes it there, chunk by chunk."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoestring.optim.arena import Arena

# The machinery is C++ (csrc/offload): an Offload for each device has the memory, the file and the copies; an
# OffloadedState has the state of an arena.
OffloadedState = Any


PLACES = "none | cpu | stream | nvme:DIR"  # as a command says it


def is_place(offload: object) -> bool:
    """Whether it is one of the places that state may be offloaded to."""
    return offload in (None, "cpu", "stream") or (isinstance(offload, str) and offload[:5] == "nvme:" < offload)


def make_offload(caller: str, offload: str, device: torch.device) -> Any:
    """What the arenas of an optimizer on one device share.

    Raises:
        RuntimeError: the file cannot be made.
    """
    return torch.classes.shoestring.Offload(f"{caller}: offload", offload, device)


# A group, an arena of its parameters, gradients, what is added to them, their factor, and whether to skip.
Work = tuple[dict[str, Any], "Arena", list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]


class Offloading:
    """The part of an optimizer that knows where the state lies."""

    offload: str | None
    # Of the optimizer:
    param_groups: list[dict[str, Any]]
    _layouts: dict[int, Any]
    step_in_backward: bool
    _init_host_steps: Callable[[], None]

    def _init_offload(self, offload: str | None) -> None:
        self.offload = offload
        self._offloads: dict[torch.device, Any] = {}
        self._init_host_steps()
        self._unfinished: tuple[list[Work], list[tuple[Tensor | None, int]]] | None = None  # a step that failed

    @property
    def _streams(self) -> bool:
        """Whether state comes to the device chunk by chunk."""
        return self.offload is not None and self.offload != "cpu"

    def _offload_of(self, device: torch.device) -> Any:
        if self.offload is None:
            return None
        if device not in self._offloads:
            self._offloads[device] = make_offload(type(self).__name__, self.offload, device)
        return self._offloads[device]

    @property
    def host_bytes(self) -> int:
        """What offloading takes of host memory, page-locked for a GPU (with "cpu", state is ordinary memory beside it)."""
        return sum(offload.host_bytes() for offload in self._offloads.values())

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return [(g, 0 if g is None else g._version) for g in grads]

    def _resumed(self) -> list[Work] | None:
        """What is left of a step that failed."""
        if self._unfinished is None:
            return None
        work, before = self._unfinished
        now = self._gradients()
        if len(now) != len(before) or any(a is not b or i != j for (a, i), (b, j) in zip(now, before, strict=True)):
            raise RuntimeError(
                f"{type(self).__name__}: step: expected the gradients of the step that failed, which this one finishes, "
                "received others; load a state dict to go on without it"
            )
        return work

    def _begin(self, work: list[Work]) -> None:
        if not self.step_in_backward:
            self._unfinished = (work, self._gradients())

    def _end(self) -> None:
        arenas = [arena for layout in self._layouts.values() for arena in layout.arenas]
        for arena in arenas:
            arena.offloaded.finish()
        commit(arenas)
        self._unfinished = None


def pieces(
    arena: "Arena", grads: list[Tensor | None], accumulated: Tensor | None
) -> Iterator[tuple["Arena", list[Tensor | None], Tensor | None]]:
    """The arena in pieces that are on the device, with their gradients and sums; to be stepped one after the other.

    What had been stepped when the same step failed before is left out.
    """
    state, start = arena.offloaded, arena.start
    members = (start, start + len(arena.params))
    in_chunk = {chunk: state.piece(chunk, *members) for chunk in state.chunks(*members)}
    with_gradients = [
        chunk
        for chunk, (first, last, *_) in in_chunk.items()
        if any(g is not None for g in grads[first - start : last - start])
    ]
    if arena.stepped is None:
        arena.stepped = arena.step.clone()
    state.start(with_gradients)
    for chunk in with_gradients:
        if state.done(chunk):
            continue
        values = state.take(chunk)
        first, last, first_block, offset, blocks = in_chunk[chunk]
        own = slice(first - start, last - start)
        piece = arena.piece(own, first_block, offset, blocks, values)
        sums = None if accumulated is None else arena.blocks_of(accumulated, own.start, first_block, blocks)
        yield piece, grads[own], sums
        arena.stepped[own] = piece.step
        state.put(chunk)


def commit(arenas: list["Arena"]) -> None:
    """Ends a step of which all pieces have been stepped and are back."""
    for arena in arenas:
        if arena.stepped is not None:
            arena.step.copy_(arena.stepped)
            arena.stepped = None
        arena.offloaded.commit()

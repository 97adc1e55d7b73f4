"""Optimizer state that is kept off the device, and the loop that streams it to the device chunk by chunk."""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoestring.optim.arena import Arena

# The C++ side is in csrc/offload. An Offload, one per device, owns the memory, the file and the copies. An
# OffloadedState holds the state of one arena.
OffloadedState = Any


PLACES = "none | cpu | stream | nvme:DIR"  # offload targets, for the help text of commands


def is_place(offload: object) -> bool:
    """Return whether ``offload`` is a valid offload target."""
    return offload in (None, "cpu", "stream") or (
        isinstance(offload, str) and offload[:5] == "nvme:" < offload
    )


def make_offload(caller: str, offload: str, device: torch.device) -> Any:
    """Make the Offload object that all arenas of an optimizer on one device share.

    Raises:
        RuntimeError: the file cannot be created.
    """
    return torch.classes.shoestring.Offload(f"{caller}: offload", offload, device)


class Offloading:
    """The part of an optimizer that manages where its state is stored."""

    offload: str | None
    # Attributes of the optimizer that this mixin uses:
    param_groups: list[dict[str, Any]]
    _layouts: dict[int, Any]
    step_in_backward: bool
    _init_host_steps: Callable[[], None]

    def _init_offload(self, offload: str | None) -> None:
        self.offload = offload
        self._offloads: dict[torch.device, Any] = {}
        self._process = os.getpid()
        self._init_host_steps()

    @property
    def _streams(self) -> bool:
        """Whether state is copied to the device chunk by chunk."""
        return self.offload is not None and self.offload != "cpu"

    def _offload_of(self, device: torch.device) -> Any:
        if self.offload is None:
            return None
        if device not in self._offloads:
            self._offloads[device] = make_offload(type(self).__name__, self.offload, device)
        return self._offloads[device]

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that offloading takes, pinned for a GPU.

        With ``offload="cpu"`` the state itself is pageable memory and is not included.
        """
        return sum(offload.host_bytes() for offload in self._offloads.values())

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has neither the worker threads nor its own file."""
        if self._process != os.getpid():
            for offload in self._offloads.values():
                offload.check()


def pieces(
    arena: "Arena", grads: list[Tensor | None], accumulated: Tensor | None
) -> Iterator[tuple["Arena", list[Tensor | None], Tensor | None]]:
    """Yield pieces of the arena that are on the device, with their gradients and gradient sums.

    The caller steps the pieces one after another. If the same step failed before, pieces that it stepped are
    left out.
    """
    state, start = arena.offloaded, arena.start
    assert state is not None
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
        try:
            yield piece, grads[own], sums
        except GeneratorExit:  # the caller raised, possibly after the operator had already stepped this piece
            if not torch.equal(piece.step, arena.step[own]):
                arena.stepped[own] = piece.step
                state.put(chunk)
            raise
        arena.stepped[own] = piece.step
        state.put(chunk)


def commit(arenas: list["Arena"]) -> None:
    """End a step: all pieces have been stepped and written back, so the new step counts become valid."""
    for arena in arenas:
        if arena.stepped is not None:
            arena.step.copy_(arena.stepped)
            arena.stepped = None
        assert arena.offloaded is not None
        arena.offloaded.commit()

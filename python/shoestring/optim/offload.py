"""Optimizer state in host memory or on a disk, and the loop that copies it to the device chunk by chunk."""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoestring.optim.arena import Arena

# A C++ class of csrc/offload that holds the offloaded state of one arena. The C++ class Offload, one object
# per device, owns the memory and the file and does the copies.
OffloadedState = Any


PLACES = "none | cpu | stream | nvme:DIR"  # values of the option offload, for the help text of commands


def is_place(offload: object) -> bool:
    """Return whether ``offload`` is valid: None, "cpu", "stream" or "nvme:DIR"."""
    return offload in (None, "cpu", "stream") or (
        isinstance(offload, str) and offload[:5] == "nvme:" < offload
    )


def make_offload(caller: str, offload: str, device: torch.device) -> Any:
    """Make the C++ object Offload, which owns host memory or a file for the state on one device.

    Raises:
        RuntimeError: the file of ``offload="nvme:DIR"`` cannot be created.
    """
    return torch.classes.shoestring.Offload(f"{caller}: offload", offload, device)


class Offloading:
    """Mixin of the optimizers. It manages where the optimizer state is stored."""

    offload: str | None
    # This mixin uses the following attributes and methods of the optimizer.
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
        """Whether the optimizer's state is copied to the device chunk by chunk."""
        return self.offload is not None and self.offload != "cpu"

    def _offload_of(self, device: torch.device) -> Any:
        if self.offload is None:
            return None
        if device not in self._offloads:
            self._offloads[device] = make_offload(type(self).__name__, self.offload, device)
        return self._offloads[device]

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that offloading takes, pinned if the parameters are on a GPU.

        With ``offload="cpu"`` this includes gradients and weights only, since the state is in pageable
        memory.
        """
        return sum(offload.host_bytes() for offload in self._offloads.values())

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child process.

        The child has no worker threads for the copies, and shares the offload file with its parent.
        """
        if self._process != os.getpid():
            for offload in self._offloads.values():
                offload.check()


def pieces(
    arena: "Arena", grads: list[Tensor | None], accumulated: Tensor | None
) -> Iterator[tuple["Arena", list[Tensor | None], Tensor | None]]:
    """Copy the state of an arena to the device chunk by chunk; yield each chunk as an arena of its own.

    With each chunk, yield the gradients of its parameters and their sums over micro-batches (or None).

    The caller steps the chunks one after another. If this step is the repetition of a failed step, chunks
    that are already stepped are left out.
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
        # The code that steps this chunk raised an error, perhaps after the operator had finished.
        except GeneratorExit:
            if not torch.equal(piece.step, arena.step[own]):
                arena.stepped[own] = piece.step
                state.put(chunk)
            raise
        arena.stepped[own] = piece.step
        state.put(chunk)


def commit(arenas: list["Arena"]) -> None:
    """End a step of offloaded state.

    All chunks of the state are stepped and written back, so the new step counts become valid.
    """
    for arena in arenas:
        if arena.stepped is not None:
            arena.step.copy_(arena.stepped)
            arena.stepped = None
        assert arena.offloaded is not None
        arena.offloaded.commit()

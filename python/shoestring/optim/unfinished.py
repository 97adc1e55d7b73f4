"""Recovery from a failed optimizer step, or from a failed backward with ``step_in_backward``."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.optim.interrupts import Uninterrupted, deliver_later
from shoestring.optim.offload import commit

if TYPE_CHECKING:
    from shoestring.optim.arena import Arena
    from shoestring.optim.host import Bucket

# Arguments for the step of one arena: group, arena, gradients, gradient sums to add, clip factor, found_inf.
Work = tuple[dict[str, Any], "Arena", list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]


@dataclass
class Unfinished:
    """An optimizer step that is running or has failed."""

    work: list[Work]
    done: int = 0  # number of elements of ``work`` (one for each arena) that have been stepped
    # The gradients of all parameters, with their version counters, at the moment when the step failed.
    gradients: list[tuple[Tensor | None, int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the step has stepped all parameters.

        The copies of offloaded state to host memory or the file may still be running.
        """
        return self.done == len(self.work)

    @property
    def has_stepped(self) -> bool:
        """Whether this step has stepped any parameter, or a part of one, before it failed."""
        arenas = (item[1] for item in self.work)
        return self.done > 0 or any(
            a.next_param > 0 or (a.offloaded is not None and a.offloaded.any_done()) for a in arenas
        )


class Backward:
    """A callback that tells the optimizer whether a backward has ended or failed.

    Autograd calls this callback at the end of the backward. If the backward fails, autograd destroys the
    callback without a call. Signals are deferred until the backward has ended, since a parameter that was
    stepped in backward cannot be restored.
    """

    def __init__(self, optimizer: "UnfinishedSteps", task: int) -> None:
        self._optimizer, self._task, self._is_open = weakref.ref(optimizer), task, True
        self._signals = Uninterrupted()
        self._signals.start()

    def _close(self, failed: bool) -> None:
        optimizer = self._optimizer()
        if self._is_open and optimizer is not None and self._task in optimizer._backwards:
            optimizer._backwards.discard(self._task)
            optimizer._backward_failed |= failed
        self._is_open = False

    def __call__(self) -> None:
        self._close(failed=False)

    # Python drops exceptions that a destructor raises. Signals are therefore deferred until the destructor
    # ends, and delivered after it.
    def __del__(self) -> None:
        self._close(failed=True)
        optimizer = self._optimizer()
        # The user may load new weights next, so wait for host jobs that still step parameters.
        if optimizer is not None:
            with torch.no_grad():
                optimizer._end_backward()
        self._signals.stop(deliver_later)


class UnfinishedSteps(Optimizer):
    """Mixin of the optimizers. It continues or drops a step that raised an error."""

    # This mixin uses the following attributes and methods of the optimizer.
    step_in_backward: bool
    _layouts: dict[int, Any]
    _jobs: "list[Bucket]"
    _accumulating: bool
    _pending: set[Tensor]
    _used: list[Tensor]
    _sums: dict[Tensor, Tensor]
    _collected: dict[Tensor, Tensor]
    _norms: list[Any]
    _drain: Callable[[], None]
    _work: Callable[[], list[Work]]
    _step_arena: Callable[..., None]
    _drop_sums: Callable[[], None]
    _finish_backward: Callable[[], None]
    _check_process: Callable[[], None]

    def _init_unfinished(self) -> None:
        self._unfinished: Unfinished | None = None  # the optimizer step that failed, if any
        # The data that an error has left inconsistent: "sums" (gradient sums), "weights", or None.
        self._broken: str | None = None
        self._backwards: set[int] = set()  # autograd's graph task ids of the running backwards
        self._backward_failed = False
        self._stepped_in_backward = False  # whether the last backward has stepped a parameter

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return [(g, 0 if g is None else g._version) for g in grads]

    # ---- steps ----------------------------------------------------------------------------------------------

    def _step_all(self) -> None:
        """Take an optimizer step, or the rest of a step that failed."""
        step = self._resumed() or Unfinished(self._work())
        self._finish_step(step)

    def _finish_step(self, step: Unfinished) -> None:
        self._unfinished, item = None, None
        try:
            while not step.is_whole:
                item = step.work[step.done]
                self._step_arena(*item)
                step.done += 1
                if item[1].offloaded is not None:
                    item[1].offloaded.finish()
            self._bring_back()
        except BaseException as error:
            if item is not None and item[1].offloaded is None and not isinstance(error, Exception):
                # An interrupt may have come after the operator changed weights, but before ``done`` counted
                # this arena.
                self._broken = "weights"
            step.gradients = self._gradients()
            self._unfinished = step
            raise
        commit([item[1] for item in step.work if item[1].offloaded is not None])
        self._drop_sums()

    def _resumed(self) -> Unfinished | None:
        """Return the failed step if no gradient has changed since the failure.

        Otherwise abandon the step and return None.
        """
        if self._unfinished is None:
            return None
        now, before = self._gradients(), self._unfinished.gradients
        if len(now) == len(before) and all(
            a is b and i == j for (a, i), (b, j) in zip(now, before, strict=True)
        ):
            return self._unfinished
        self._abandon()
        return None

    def _abandon(self) -> None:
        """End a failed step before another begins.

        Complete the failed step if it has stepped all parameters. Raise an error if it has stepped only some.
        """
        step = self._unfinished
        if step is None:
            return
        if step.is_whole:
            self._finish_step(step)
            return
        if step.has_stepped:
            raise RuntimeError(
                f"{type(self).__name__}: step: expected the gradients of the step that failed, which has stepped some "
                "parameters, received others. Load the weights and the optimizer's state of a checkpoint."
            )
        for _, arena, *_ in step.work:
            if arena.offloaded is not None:
                arena.offloaded.discard()
            if arena.host is not None:
                arena.host.collect(0, len(arena.params))
            arena.stepped, arena.has_fetched = None, False
        self._unfinished = None
        self._drop_all_sums()

    def _bring_back(self) -> None:
        """Wait until all offloaded state that was stepped is back in host memory or in the file."""
        for layout in self._layouts.values():
            for arena in layout.arenas:
                if arena.offloaded is not None:
                    arena.offloaded.finish()

    def _drop_all_sums(self) -> None:
        for total in self._sums.values():
            total.zero_()
        self._drop_sums()

    def _settle(self) -> None:
        """Finish pending steps and copies of state, so that the state can be read or saved."""
        self._end_backward()
        self._drain()
        step = self._unfinished
        if step is not None and step.is_whole:
            self._abandon()
        elif step is not None and step.has_stepped:
            raise RuntimeError(
                f"{type(self).__name__}: state_dict: expected a whole step, received one that failed after it had "
                "stepped some parameters. Call step() again with its gradients, or load a checkpoint."
            )
        self._bring_back()

    @_disable_dynamo
    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in ``torch.optim.Optimizer``.

        If a step or a backward raised an error before it stepped any parameter, its remaining work is
        dropped, too. The gradient sums of ``accumulate()`` are dropped as well.
        """
        super().zero_grad(set_to_none)
        self._end_backward()
        step = self._unfinished
        if step is not None and (step.is_whole or not step.has_stepped):
            self._abandon()
        if self._broken == "sums":
            self._drop_all_sums()
            self._broken = None
        if not self.step_in_backward or self._accumulating:
            return
        # zero_grad() ends the last backward. Parameters that the backward stepped keep their new weights, and
        # gradients that the backward collected are dropped.
        self._drain()
        if self._collected:
            self._drop_all_sums()
        self._bring_back()
        self._finish_backward()

    # ---- backward -------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _begin_backward(self) -> None:
        """Note that a backward is running, and register a callback for its end.

        With activation checkpointing, one backward may run within another.
        """
        task = torch._C._current_graph_task_id()
        if task in self._backwards:
            return
        if not self._backwards:
            self._check_process()
            self._end_backward()
            self._check_whole("backward")
            self._abandon()
            self._stepped_in_backward = False
        if task < 0:
            return
        self._backwards.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(Backward(self, task))

    def _end_backward(self) -> None:
        """Clean up after a backward that failed when hooks had already received some of its gradients."""
        if not self._backward_failed:
            return
        self._backward_failed = False
        partial = [bucket for bucket in self._jobs if bucket.arrived]
        for bucket in partial:
            bucket.arrived = set()
        # The backward has already raised an error, so ignore errors of the host jobs that it started.
        with suppress(Exception):
            self._drain()
        for bucket in partial:
            bucket.arena.host.collect(bucket.first, bucket.last)
        self._norms.clear()
        if self._stepped_in_backward:
            self._broken = "weights"
        elif self._pending or self._used:
            self._broken = "sums"
        else:
            self._drop_sums()

    def _check_whole(self, what: str) -> None:
        if self._broken == "weights":
            raise RuntimeError(
                f"{type(self).__name__}: {what}: expected a whole step before, received one that failed after it had "
                "stepped some parameters. Load the weights and the optimizer's state of a checkpoint."
            )
        if self._broken == "sums":
            raise RuntimeError(
                f"{type(self).__name__}: {what}: expected whole sums of gradients, received those of a step that "
                "failed. Call zero_grad() to drop them, and begin with the first micro-batch of the step."
            )

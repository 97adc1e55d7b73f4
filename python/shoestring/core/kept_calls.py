"""Keep the results of few operators between the runs of a checkpoint, without a record of all other operators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")

# Operators that ``kept_call`` calls. Which experts a token has must not depend on the rounding of a second run.
OPERATORS = ("shoestring::moe_route", "shoestring::moe_sort")

# Tapes that no checkpoint uses. To make a tape takes 1.5 ms, since it looks for the names of all operators.
_unused_tapes: list[Any] = []


class _Call:
    """The results of one call of an operator."""

    def __init__(self) -> None:
        try:
            self.tape = _unused_tapes.pop()
        except IndexError:
            self.tape = torch.classes.shoestring.OperatorTape(list(OPERATORS))

    def record(self, call: Callable[[], T]) -> T:
        """Run the call and keep its results."""
        self.tape.record()
        try:
            result = call()
        except BaseException:
            self.tape.abandon()
            raise
        with saved_tensors_hooks(_same, _same):  # the checkpoint's own hooks would drop the results
            self.tape.end()
        return result

    def replay(self, call: Callable[[], T]) -> T:
        """Run the call; its operator returns the kept results. Autograd records it as in the first run."""
        self.tape.replay()
        try:
            return call()
        finally:
            self.tape.end()

    def __del__(self) -> None:
        self.tape.record()  # frees the results
        self.tape.end()
        _unused_tapes.append(self.tape)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Choice:
    """The result of one call that has no gradient."""

    result: Any

    def record(self, call: Callable[[], T]) -> T:
        self.result = result = call()
        return result

    def replay(self, call: Callable[[], T]) -> T:
        result: T = self.result
        return result


@dataclass
class _Run:
    """One run of a checkpointed function on one thread."""

    calls: list[_Call | _Choice]
    recording: bool
    pass_: int  # the backward pass that runs the function, -1 for none
    played: int = 0


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Run] = []


_runs = _Runs()


class KeptCalls:
    """The calls of ``kept_call`` in the first run of a checkpointed function, in order."""

    def __init__(self) -> None:
        self._calls: list[_Call | _Choice] = []

    @contextmanager
    def run(self, recording: bool) -> Iterator[None]:
        """Run the block as the first run of the function, or as a later run."""
        _runs.stack.append(_Run(self._calls, recording, torch._C._current_graph_task_id()))
        try:
            yield
        finally:
            _runs.stack.pop()


def kept_call(call: Callable[[], T]) -> T:
    """Return the result of ``call``, which calls one of OPERATORS, and keep it if a checkpoint is active.

    In a later run of a checkpointed function, the operator returns the results of the first run. If checkpoints are
    nested, all of them keep the results. A backward pass inside a function computes its calls anew.
    """
    return _kept(call, _Call)


def kept_choice(call: Callable[[], T]) -> T:
    """Return the result of ``call``, which has no gradient, and keep it as ``kept_call`` does.

    A later run of a checkpointed function gets the same objects, without a call. Nobody may modify them.
    """
    return _kept(call, _Choice)


def _kept(call: Callable[[], T], kind: type[_Call | _Choice]) -> T:
    if torch.compiler.is_compiling() or not _runs.stack:
        return call()
    pass_ = torch._C._current_graph_task_id()
    runs = [run for run in _runs.stack if run.pass_ == pass_]
    kept = None
    for run in runs:
        if not run.recording:
            if kept is None and run.played < len(run.calls):
                kept = run.calls[run.played]
            run.played += 1
    recording = [run for run in runs if run.recording]
    if kept is None and not recording:
        return call()
    used = kept or kind()
    for run in recording:
        run.calls.append(used)
    return used.record(call) if kept is None else used.replay(call)

"""SIGINT and SIGTERM: the first one ends a command in order, the second one at once.

Python calls a handler between two bytecodes, and a whole backward pass is one bytecode. The second signal must not wait
for it, so a thread reads the wakeup file descriptor, which Python's C handler writes at once. Code that defers a signal,
as the optimizers do within a step, delivers it again and so writes twice: whatever is written before the handler has run
is one signal, unless the handler does not run for a second.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)
LONG_WAIT = 20.0  # seconds that a person should be told of; batch systems kill about 30 s after SIGTERM


class Interrupted(BaseException):
    """A signal has ended the command. The text is the line for the terminal, the exit code is 128 + ``number``."""

    def __init__(self, number: int, text: str = "interrupted") -> None:
        super().__init__(text)
        self.number = number


PATIENCE = 1.0  # seconds in which a handler runs unless the main thread is inside a long call

_received: int | None = None
_deferred = False
_announced = False
_handled = threading.Event()  # the handler has run
_pipe = -1  # where the numbers of signals that no handler has answered are read
_reading = threading.RLock()


def received() -> int | None:
    """Return the signal that is to end the command, if one has come."""
    return _received


@contextmanager
def deferred() -> Iterator[None]:
    """Let the first signal wait for the end of the block, which asks ``received``; it raises Interrupted there."""
    global _deferred
    _deferred = True
    try:
        _raise_received()
        yield
    finally:
        _deferred = False
    _raise_received()


@contextmanager
def handled() -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block: Interrupted at the first signal, the end of the process at the next.

    A signal that the process ignores, as a shell's background job does, stays ignored.
    """
    global _received, _announced, _pipe
    if threading.current_thread() is not threading.main_thread():  # only the main thread may have handlers
        yield
        return
    _received, _announced = None, False
    _handled.clear()
    _pipe, writable = os.pipe()
    for end in (_pipe, writable):
        os.set_blocking(end, False)
    watcher = threading.Thread(target=_watch, daemon=True)
    watcher.start()
    before = {number: signal.getsignal(number) for number in HANDLED}
    replaced = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    wakeup = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        for number in replaced:
            signal.signal(number, _handle)
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup)
        os.close(writable)
        watcher.join()
        os.close(_pipe)


def _raise_received() -> None:
    if _received is not None:
        raise Interrupted(_received)


def _handle(number: int, _: FrameType | None) -> None:
    global _received
    with _reading:
        _read()  # what has been written so far is this signal
        _handled.set()
    _received = number
    _announce(number)
    if not _deferred:
        raise Interrupted(number)


def _watch() -> None:
    """End the process at the second signal; return once the pipe is closed."""
    count = 0
    while select.select([_pipe], [], []):
        with _reading:
            numbers = _read()
            if numbers is None:
                return
            second = _handled.is_set()
        for number in numbers:
            if number not in HANDLED:
                continue
            count += 1
            if second or (count > 1 and not _handled.wait(PATIENCE)):
                _say(f"second signal ({signal.Signals(number).name}): exit at once")
                os._exit(128 + number)
            _announce(number)


def _announce(number: int) -> None:
    """Say once, from the handler or before it can run, that the step goes on."""
    global _announced
    with _reading:
        if _deferred and not _announced:
            _announced = True
            name = signal.Signals(number).name
            _say(f"{name}: the step is finished and a checkpoint saved; a second signal exits at once")


def _read() -> bytes | None:
    """The numbers that are in the pipe; None after its end."""
    try:
        return os.read(_pipe, 64) or None
    except BlockingIOError:
        return b""


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"shoestring: {text}\n".encode())

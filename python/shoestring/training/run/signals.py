"""Handle SIGINT and SIGTERM: the first signal ends a command cleanly, the second one ends it at once.

Python calls a signal handler between two bytecodes, and a whole backward pass is one bytecode. The reaction
to a second signal must not wait until a backward pass ends. A thread therefore reads the signal numbers that
Python's C handler writes to the wakeup file descriptor at once.

An optimizer defers a signal during its step and delivers it again afterwards, so its number is written twice.
Therefore all numbers written before the Python handler has run count as one signal. If the Python handler
does not run for ``PATIENCE`` seconds, a second number counts as a second signal.
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
# A wait longer than this many seconds is announced, since batch systems kill a process about 30 s after
# SIGTERM.
LONG_WAIT = 20.0


class Interrupted(BaseException):
    """Raised if a signal ends the command. Its text is for the user; the exit code is 128 + ``number``."""

    def __init__(self, number: int, text: str = "interrupted") -> None:
        super().__init__(text)
        self.number = number


# Seconds after which a Python handler that has not run must be waiting for a long call in the main thread.
PATIENCE = 1.0

_received: int | None = None
_deferred = False
_announced = False
_handled = threading.Event()  # the Python signal handler sets this event
_pipe = -1  # read end of the wakeup pipe, which holds signal numbers that have not been read yet
_reading = threading.RLock()


def received() -> int | None:
    """Return the number of the signal that has arrived and will end the command, or None."""
    return _received


@contextmanager
def deferred() -> Iterator[None]:
    """If a first signal arrives inside the ``with`` block, raise Interrupted at the end of the block.

    Code inside the block calls ``received`` to learn whether a signal has arrived.
    """
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
    """Handle SIGINT and SIGTERM in the block: the first raises Interrupted, the second ends the process.

    A signal that the process already ignores stays ignored. For example, a background job of a shell ignores
    SIGINT.
    """
    global _received, _announced, _pipe
    # Python allows signal handlers in the main thread only
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
        _received, _announced = None, False  # a later run in this process starts without a signal


def _raise_received() -> None:
    if _received is not None:
        raise Interrupted(_received)


def _handle(number: int, _: FrameType | None) -> None:
    """Handle a signal: announce it, and raise Interrupted unless the exception is deferred."""
    global _received
    with _reading:
        _read()  # discard the signal numbers in the pipe, which all belong to this signal
        _handled.set()
    _received = number
    _announce(number)
    if not _deferred:
        raise Interrupted(number)


def _watch() -> None:
    """Read signal numbers from the wakeup pipe; end the process at the second signal.

    Return when the pipe is closed.
    """
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
    """Print once that the current step will be finished before the command ends.

    The Python signal handler calls this function. If the handler cannot run yet, the thread that reads the
    wakeup pipe calls it first.
    """
    global _announced
    with _reading:
        if _deferred and not _announced:
            _announced = True
            name = signal.Signals(number).name
            _say(f"{name}: finishes the step and saves a checkpoint; a second signal exits at once")


def _read() -> bytes | None:
    """Return the signal numbers in the wakeup pipe, b"" if there are none, or None if it is closed."""
    try:
        return os.read(_pipe, 64) or None
    except BlockingIOError:
        return b""


def _say(text: str) -> None:
    with suppress(OSError):  # writing fails if the terminal is closed
        os.write(2, f"shoestring: {text}\n".encode())

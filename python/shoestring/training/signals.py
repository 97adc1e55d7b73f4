"""Handle SIGINT and SIGTERM: the first signal ends a command cleanly, the second one ends it at once.

Python calls a signal handler between two bytecodes, and a whole backward pass is one bytecode. The second
signal must not wait for it. A thread therefore reads the wakeup file descriptor, to which Python's C handler
writes at once.

Code that defers a signal (an optimizer during its step) delivers the signal again, so its number is written
twice. All numbers written before the Python handler has run therefore count as one signal. The exception: the
handler does not run for a second (``PATIENCE``).
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
LONG_WAIT = 20.0  # seconds; longer waits are announced, since batch systems kill about 30 s after SIGTERM


class Interrupted(BaseException):
    """A signal has ended the command. The text is for the terminal; the exit code is 128 + ``number``."""

    def __init__(self, number: int, text: str = "interrupted") -> None:
        super().__init__(text)
        self.number = number


PATIENCE = 1.0  # seconds; a handler that has not run by then waits for a long call in the main thread

_received: int | None = None
_deferred = False
_announced = False
_handled = threading.Event()  # set once the Python handler has run
_pipe = -1  # read end of the wakeup pipe: numbers of signals that the handler has not taken yet
_reading = threading.RLock()


def received() -> int | None:
    """Return the number of the signal that is to end the command, or None."""
    return _received


@contextmanager
def deferred() -> Iterator[None]:
    """Defer the first signal to the end of the block, and raise Interrupted there.

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
    """Handle SIGINT and SIGTERM inside the block: the first raises Interrupted, the second ends the process.

    A signal that the process ignores stays ignored; a background job of a shell ignores SIGINT, for example.
    """
    global _received, _announced, _pipe
    # Python allows signal handlers in the main thread only
    if threading.current_thread() is not threading.main_thread():
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
        _read()  # all numbers written so far belong to this signal
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
    """Say once that the current step will be finished.

    The handler calls this, or the watching thread if the handler cannot run yet.
    """
    global _announced
    with _reading:
        if _deferred and not _announced:
            _announced = True
            name = signal.Signals(number).name
            _say(f"{name}: the step is finished and a checkpoint saved; a second signal exits at once")


def _read() -> bytes | None:
    """Return the signal numbers in the pipe, b"" if there are none, or None if the pipe is closed."""
    try:
        return os.read(_pipe, 64) or None
    except BlockingIOError:
        return b""


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"shoestring: {text}\n".encode())

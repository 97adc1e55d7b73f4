"""Signals that wait until a step is whole."""

import _signal  # type: ignore[import-not-found]  # signal's own wrappers take five times as long
import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# typeshed wants a signal.Signals; any number of a signal will do.
_interrupt_main: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]
SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class Uninterrupted:
    """Defers the Python handlers of SIGINT and SIGTERM, which may raise, until ``stop()`` or the end of ``with``.

    Only the main thread runs such handlers: in another one nothing happens. A second signal of the same kind does not
    wait: both reach their handler at once. May be nested.
    """

    __slots__ = ("_defers", "_handlers", "_pending")

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._defers = False

    def start(self) -> None:
        """Begins to defer."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._defers = True
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._defer)
        except BaseException:  # another signal's handler
            self.stop()
            raise

    def stop(self, deliver: Callable[[int], None] = _interrupt_main) -> None:
        """Restores the handlers and delivers what has come meanwhile."""
        if not self._defers:
            return
        self._restore()
        pending, self._pending = self._pending, []
        list(map(deliver, pending))  # no handler runs, and raises, between them

    def _restore(self) -> None:
        self._defers = False
        if threading.current_thread() is not threading.main_thread():
            return  # where backward ends in another thread: the next signal passes, and restores its handler
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._defer:  # nobody has set another one meanwhile
                _signal.signal(number, handler)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._defers and number not in self._pending:
            self._pending.append(number)
            return
        was_first = not self._defers  # set again by somebody who had kept this handler
        self._restore()
        self._handlers[number](number, frame)
        if not was_first:
            self._pending.remove(number)
            signal.raise_signal(number)

    def __enter__(self) -> "Uninterrupted":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()


def deliver_later(number: int) -> None:
    """Runs the handler of a signal soon after the current frame has ended: a destructor cannot raise."""
    _thread.start_new_thread(_interrupt_main, (number,))

"""Deferral of SIGINT and SIGTERM until an optimizer step is complete."""

import _signal  # type: ignore[import-not-found]  # the wrappers in signal take five times as long
import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# typeshed declares a signal.Signals argument, but any signal number works.
_interrupt_main: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]
SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class Uninterrupted:
    """Defer the Python handlers of SIGINT and SIGTERM until ``stop()`` or the end of ``with``.

    Such handlers may raise and leave a step half done. Only the main thread runs them, so in another thread
    this does nothing. A second signal of the same kind ends the deferral: both reach their handler at once.
    Instances may be nested.
    """

    __slots__ = ("_defers", "_handlers", "_pending")

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._defers = False

    def start(self) -> None:
        """Begin to defer signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._defers = True
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._defer)
        except BaseException:  # the handler of another signal may raise here
            self.stop()
            raise

    def stop(self, deliver: Callable[[int], None] = _interrupt_main) -> None:
        """Restore the handlers and deliver the signals that arrived meanwhile."""
        if not self._defers:
            return
        self._restore()
        pending, self._pending = self._pending, []
        # A handler that raises could interrupt a Python loop. map and the default deliver run in C, so that every
        # pending signal is delivered.
        list(map(deliver, pending))

    def _restore(self) -> None:
        self._defers = False
        if threading.current_thread() is not threading.main_thread():
            # Backward may end in another thread. The next signal passes through and restores its handler.
            return
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._defer:  # nobody has set another handler meanwhile
                _signal.signal(number, handler)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._defers and number not in self._pending:
            self._pending.append(number)
            return
        was_first = not self._defers  # true if other code saved this handler and installed it again later
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
    """Run the handler of a signal soon after the current frame has ended.

    Destructors need this, since an exception cannot leave them.
    """
    _thread.start_new_thread(_interrupt_main, (number,))

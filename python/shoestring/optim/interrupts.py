"""Deferral of SIGINT and SIGTERM until an optimizer step is complete."""

import _signal  # type: ignore[import-not-found]  # the wrappers in signal take five times as long
import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# typeshed declares the argument of interrupt_main as signal.Signals, but any signal number works.
_interrupt_main: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]
SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))


class Uninterrupted:
    """Defer the Python handlers of SIGINT and SIGTERM until ``stop()`` or the end of ``with``.

    A handler may raise an exception and leave an optimizer step half done. Python runs handlers only in the
    main thread, so in another thread this class does nothing. A second signal of the same kind ends the
    deferral, and both signals are handled at once. Instances may be nested.
    """

    __slots__ = ("_defers", "_handlers", "_pending")

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._defers = False

    def start(self) -> None:
        """Begin to defer SIGINT and SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._defers = True
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._defer)
        except BaseException:  # the handler of another signal may raise at any point of this block
            self.stop()
            raise

    def stop(self, deliver: Callable[[int], None] = _interrupt_main) -> None:
        """Restore the handlers of SIGINT and SIGTERM. Deliver the signals that arrived since ``start()``."""
        if not self._defers:
            return
        self._restore()
        pending, self._pending = self._pending, []
        # A handler that raises could interrupt a Python loop over the pending signals. map and interrupt_main
        # run in C, so that every pending signal is delivered.
        list(map(deliver, pending))

    def _restore(self) -> None:
        self._defers = False
        if threading.current_thread() is not threading.main_thread():
            # Backward may end in another thread, which cannot set handlers. The deferring handler therefore
            # stays: at the next signal it restores the original handler and calls it.
            return
        for number, handler in self._handlers.items():
            # Restore only if no other code has set another handler since start().
            if _signal.getsignal(number) == self._defer:
                _signal.signal(number, handler)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: keep it for later while signals are deferred, else pass it to its handler."""
        if self._defers and number not in self._pending:
            self._pending.append(number)
            return
        # True if the deferral has ended, but other code saved the deferring handler and installed it again.
        was_first = not self._defers
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

    A destructor needs this for a signal that was deferred: an exception cannot leave a destructor.
    """
    _thread.start_new_thread(_interrupt_main, (number,))

"""Show measurements below the output of a program, on a terminal.

The program writes to a pseudo-terminal, so that it behaves as on a terminal. Its complete lines are printed above the
measurements, and its last, incomplete line, such as a progress bar, is shown directly above them.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import sys
import termios
import time
from contextlib import suppress
from typing import Any

from shoestring.runs.monitor_process import ProcessMonitor

REFRESH = 0.5  # seconds between two updates of the measurements
RECENT = 2.0  # seconds over which rates are averaged


class LiveView:
    """The view of one program."""

    def __init__(self) -> None:
        self._main = self._program = -1
        self._live: Any = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._table, self._next = "", 0.0  # the table, and the time of its next update

    def terminal(self) -> int:
        """Return the file descriptor that the program writes to."""
        self._main, self._program = pty.openpty()
        with suppress(OSError):
            size = fcntl.ioctl(sys.stdout, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._program, termios.TIOCSWINSZ, size)
        return self._program

    def start(self) -> None:
        """Begin to show. The program has been started."""
        from rich.console import Console
        from rich.live import Live

        os.close(self._program)
        self._program = -1
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._live.start()

    def show(self, monitor: ProcessMonitor) -> None:
        """Print what the program writes until the next update, and update the measurements."""
        if time.monotonic() >= self._next:
            recent = monitor.recent(RECENT)
            self._table = str(recent) if recent.samples[0]["seconds"] else "measuring"
            self._next = time.monotonic() + REFRESH
        if self._main < 0:  # the program has closed its output
            time.sleep(REFRESH)
        self._read(REFRESH)

    def _read(self, seconds: float) -> None:
        if self._main >= 0 and select.select([self._main], [], [], seconds)[0]:
            try:
                data = os.read(self._main, 65536)
            except OSError:  # the program has ended
                data = b""
            if not data:
                self._close()
            self._print(self._decoder.decode(data))
        self._update()

    def _print(self, text: str) -> None:
        from rich.text import Text

        *lines, self._line = (self._line + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            self._live.console.print(Text.from_ansi(line.rpartition("\r")[2]), soft_wrap=True)

    def _update(self) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        last = self._line.rstrip("\r").rpartition("\r")[2]
        parts: list[Any] = [Text.from_ansi(last)] if last else []
        self._live.update(Group(*parts, Panel(self._table, title="shoestring monitor")), refresh=True)

    def _close(self) -> None:
        for end in (self._main, self._program):
            if end >= 0:
                os.close(end)
        self._main = self._program = -1

    def stop(self) -> None:
        """Print what is left of the output, and end the view. A second call does nothing."""
        if self._live is not None:
            while self._main >= 0 and select.select([self._main], [], [], 0)[0]:
                self._read(0)
            if self._line:
                self._print("\n")
            self._live.stop()
        self._live = None
        self._close()

"""Print progress lines, from a background thread, about work that takes more than two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoestring.core.errors import printable

# FIRST: seconds before the first progress line. LONGEST_PAUSE: maximum seconds between two lines.
FIRST, LONGEST_PAUSE = 2.0, 30.0


@dataclass(eq=False)
class Work:
    """Work in progress, such as reading files. ``done`` counts up to ``total``, for example in bytes."""

    what: str
    total: int
    began: float
    done: int = 0

    def line(self) -> str:
        """Return the progress line: the finished share in percent, if known, and the time since the start."""
        seconds = int(time.monotonic() - self.began)
        share = f"{100 * self.done // self.total} %, " if self.done < self.total else ""
        return printable(f"{self.what}: {share}{seconds // 60}:{seconds % 60:02d}")


_under_way: list[Work] = []


def advance(count: int) -> None:
    """Add ``count`` to the progress of the innermost :func:`working` block, if there is any."""
    if _under_way:
        _under_way[-1].done += count


@contextmanager
def working(what: str, total: int = 0) -> Iterator[None]:
    """Print progress lines while the ``with`` block runs, from two seconds on.

    The block reports its progress by :func:`advance`, up to ``total``.
    """
    work = Work(what, total, time.monotonic())
    finished = threading.Event()

    def tell() -> None:
        pause = FIRST
        while not finished.wait(pause):
            try:
                print(work.line(), flush=True)
            except (OSError, ValueError):
                # ignore the error: the process that reads the output has ended, or the output is closed
                return
            pause = min(1.5 * pause, LONGEST_PAUSE)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    _under_way.append(work)
    try:
        yield
    finally:
        _under_way.remove(work)
        finished.set()
        thread.join()

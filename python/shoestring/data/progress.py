"""Lines about work that takes more than two seconds, printed by a thread while the work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FIRST, LONGEST_PAUSE = 2.0, 30.0  # seconds before the first line, and at most between two lines


@dataclass(eq=False)
class Work:
    """Work under way; ``done`` counts towards ``total``."""

    what: str
    total: int
    began: float
    done: int = 0

    def line(self) -> str:
        """Describe how far the work is: a share while it is known, and the time since it began."""
        seconds = int(time.monotonic() - self.began)
        share = f"{100 * self.done // self.total} %, " if self.done < self.total else ""
        return f"{self.what}: {share}{seconds // 60}:{seconds % 60:02d}"


_under_way: list[Work] = []


def advance(count: int) -> None:
    """Count towards the innermost work under way, if there is any."""
    if _under_way:
        _under_way[-1].done += count


@contextmanager
def working(what: str, total: int = 0) -> Iterator[None]:
    """Print a line about the block after two seconds and then less and less often; ``advance`` counts to ``total``."""
    work = Work(what, total, time.monotonic())
    finished = threading.Event()

    def tell() -> None:
        pause = FIRST
        while not finished.wait(pause):
            try:
                print(work.line(), flush=True)
            except (OSError, ValueError):  # nobody reads any more, or the stream is closed
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

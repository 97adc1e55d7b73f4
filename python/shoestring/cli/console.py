"""Show progress on the terminal: a bar, or occasional lines if the output is not a terminal."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

_silent = False  # whether another process of the run talks to the terminal
LINES = 20  # number of lines printed during a run if the output is not a terminal
RECENT = 10  # number of recent steps whose median time gives the time left


class Console:
    """Show loss, validation loss, tokens/s, memory and the time left of a run.

    Use it as a context manager.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // LINES)
        self._bar: Any = None
        self._task: Any = None
        self._seconds: list[float] = []

    def __enter__(self) -> Console:
        if sys.stdout.isatty() and not _silent:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}")
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._steps)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        (self._bar.console.print if self._bar is not None else say)(text)

    def step(self, metrics: dict[str, Any], val_loss: float | None) -> None:
        """Show one finished step."""
        if _silent:
            return
        number = metrics["step"]
        self._seconds.append(metrics["seconds"])
        text = describe(metrics, val_loss) + self._left(number)
        if self._bar is not None:
            self._bar.update(self._task, completed=number, description=text)
        elif number % self._every == 0 or number in (1, self._steps) or "val_loss" in metrics:
            width = len(str(self._steps))
            print(f"step {number:>{width}}/{self._steps}  {text}", flush=True)

    def _left(self, number: int) -> str:
        """Return the time left after step ``number`` as text.

        The first step of a process includes warm-up, so it is not used for the estimate.
        """
        recent = self._seconds[1:][-RECENT:]
        return f"  {clock((self._steps - number) * statistics.median(recent))} left" if recent else ""


def describe(metrics: dict[str, Any], val_loss: float | None) -> str:
    """Describe one step in one line."""
    val = f"  val {val_loss:.3f}" if val_loss is not None else ""
    return (
        f"loss {metrics['loss']:.3f}{val}  lr {metrics['lr']:.1e}  "
        f"{metrics['tokens_per_second']:,.0f} tok/s  peak {gigabytes(metrics.get('device_peak', metrics['peak']))}"
    )


def gigabytes(count: float) -> str:
    """Format bytes as GB (10^9 bytes), or as MB below 1 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def silence(silent: bool) -> None:
    """Select whether this process says nothing, since another process of the run does."""
    global _silent
    _silent = silent


def say(text: str) -> None:
    """Print a line, with the time of day if the output is a terminal."""
    if _silent:
        return
    print(f"{time.strftime('%H:%M:%S')}  {text}" if sys.stdout.isatty() else text, flush=True)


def print_table(rows: list[list[str]], texts: tuple[int, ...] = (0,)) -> None:
    """Print rows in columns, headings first; right-align all columns except those listed in `texts`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = enumerate(zip(row, widths))
        print("  ".join(cell.ljust(n) if i in texts else cell.rjust(n) for i, (cell, n) in cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))

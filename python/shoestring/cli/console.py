"""Show progress on the terminal: a bar, or occasional lines if the output is not a terminal."""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import Any

from shoestring.core.errors import printable

_silent = False  # whether another process of the run talks to the terminal
LINES = 20  # number of lines printed during a run if the output is not a terminal
RECENT = 10  # number of recent steps, and of validations, whose median time gives the time left


class Console:
    """Show loss, validation loss, tokens/s, memory and the time left of a run.

    Use it as a context manager.

    Args:
        steps: number of steps of the run.
        eval_every: number of steps between two validations; 0 if there is none.
    """

    def __init__(self, steps: int, eval_every: int = 0) -> None:
        self._steps = steps
        self._eval_every = eval_every
        self._every = max(1, steps // LINES)
        self._bar: Any = None
        self._task: Any = None
        self._seconds: list[float] = []
        self._eval_seconds: list[float] = []
        self._validated: tuple[float, int] | None = None  # the last validation loss and its step

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
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(printable(text), markup=False, highlight=False)

    def step(self, metrics: dict[str, Any]) -> None:
        """Show one finished step."""
        if _silent:
            return
        number = metrics["step"]
        self._seconds.append(metrics["seconds"])
        if "val_loss" in metrics:
            self._validated = metrics["val_loss"], number
            self._eval_seconds.append(metrics.get("val_seconds", 0.0))
        # The bar keeps the last validation loss; a line has its own alone.
        shown = self._validated if self._bar is not None or "val_loss" in metrics else None
        text = describe(metrics, shown) + self._time_left(number)
        if self._bar is not None:
            self._bar.update(self._task, completed=number, description=text)
        elif number % self._every == 0 or number in (1, self._steps) or "val_loss" in metrics:
            width = len(str(self._steps))
            print(f"step {number:>{width}}/{self._steps}  {text}", flush=True)

    def _time_left(self, number: int) -> str:
        """Return the time left after step ``number`` as text, with the validations that are still to come.

        The first step of a process includes warm-up, so it is not used for the estimate.
        """
        recent = self._seconds[1:][-RECENT:]
        if not recent:
            return ""
        seconds = (self._steps - number) * statistics.median(recent)
        if self._eval_every and self._eval_seconds:
            # A validation follows every eval_every-th step, and the last one.
            validations = math.ceil(self._steps / self._eval_every) - number // self._eval_every
            per_validation = statistics.median(self._eval_seconds[-RECENT:])
            seconds += (validations if number < self._steps else 0) * per_validation
        return f"  {clock(seconds)} left"


def describe(metrics: dict[str, Any], validated: tuple[float, int] | None) -> str:
    """Describe one step in one line. ``validated`` is the last validation loss and its step, if there was any."""
    val = ""
    if validated is not None:
        of_step = "" if validated[1] == metrics["step"] else f" (step {validated[1]})"
        val = f"  val {validated[0]:.3f}{of_step}"
    return (
        f"loss {metrics['loss']:.3f}{val}  lr {metrics['lr']:.1e}  "
        f"{metrics['tokens_per_second']:,.0f} tok/s  peak {gigabytes(metrics.get('device_peak', metrics['peak']))}"
    )


def gigabytes(count: float) -> str:
    """Format bytes as GB (10^9 bytes), or as MB below 1 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    whole_seconds = int(seconds)
    hours, rest = divmod(whole_seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def silence(silent: bool) -> None:
    """Select whether this process says nothing, since another process of the run does."""
    global _silent
    _silent = silent


def say(text: str) -> None:
    """Print a line, with the time of day if the output is a terminal."""
    if _silent:
        return
    text = printable(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}" if sys.stdout.isatty() else text, flush=True)


def print_table(rows: list[list[str]], texts: tuple[int, ...] = (0,)) -> None:
    """Print rows in columns, headings first; right-align all columns except those listed in `texts`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = enumerate(zip(row, widths))
        print("  ".join(cell.ljust(n) if i in texts else cell.rjust(n) for i, (cell, n) in cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))

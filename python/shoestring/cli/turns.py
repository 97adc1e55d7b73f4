"""Run several commands in turns, so that only one of them runs at a time.

The speed of a machine drifts within minutes. Runs that alternate every few seconds see the same drift, so
their median step times can be compared. Each run is a separate process, so its peak memory is its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoestring.cli.console import clock, say
from shoestring.core.errors import InputError

# Seconds per turn. A turn is several steps long, so the one step interrupted by a pause does not move the
# median.
TURN = 12.0
SPEED = re.compile(r"[\d,]+ tok/s")  # the speed of a step in a line of a run
STEP = re.compile(r"step +(\d+)/(\d+) ")  # the start of a line of a run


class Command:
    """A command that runs while it has its turn, and the steps that it has printed."""

    def __init__(self, name: str, arguments: list[str], width: int, logs: Path) -> None:
        self.name = name
        self.width = width
        self.errors = logs / f"{name}.err"
        self.spent = 0.0  # seconds of the turns that have ended
        self.began: float | None = None  # when the turn under way began
        self.first = self.last = (0.0, 0)  # the first and the last step, after so many seconds of turns
        self.steps = 0
        self.was_paused = False  # since the last line with a speed
        # Waiting OpenMP threads sleep. On a shared machine, spinning threads take CPU time from working threads.
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoestring.cli", *arguments],
                stdout=subprocess.PIPE, stderr=errors, text=True, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )  # fmt: skip
        self.process.send_signal(signal.SIGSTOP)
        self.reader = threading.Thread(target=self._show, daemon=True)
        self.reader.start()

    def turn(self, is_alone: bool) -> bool:
        """Let the command run for a while, or to its end. Return whether it goes on."""
        self.was_paused = self.spent > 0
        self.began = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        try:
            code = self.process.wait(timeout=None if is_alone else TURN)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGSTOP)
            return True
        finally:
            self.spent = self._seconds()
            self.began = None
        if code != 0:
            lines = self.errors.read_text().strip().splitlines() or [""]
            raise InputError(f"demo: the run {self.name} ended with exit code {code}: {lines[-1]}")
        return False

    def seconds_left(self) -> float | None:
        """Return the seconds that the command still needs; None before its second step."""
        if self.process.returncode is not None:
            return 0.0
        (start, first), (end, last) = self.first, self.last
        return (self.steps - last) * (end - start) / (last - first) if last > first else None

    def _seconds(self) -> float:
        """Return the seconds that the command has run, without its pauses."""
        return self.spent + (0.0 if self.began is None else time.monotonic() - self.began)

    def _show(self) -> None:
        """Print the lines of the command. The speed of a step within which it was paused is not shown."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.rstrip()
            if step := STEP.match(text):
                number, self.steps = map(int, step.groups())
                self.last = (self._seconds(), number)
                self.first = self.last if self.first[1] == 0 else self.first
            if self.was_paused and SPEED.search(text):
                self.was_paused = False
                text = SPEED.sub("(paused)", text)
            print(f"{self.name:>{self.width}} | {text}", flush=True)


def run_in_turns(
    commands: dict[str, list[str]],
    logs: Path,
    later: Callable[[dict[str, float]], float] = lambda seconds: 0.0,
) -> None:
    """Run `shoestring ARGUMENTS` for each name and print its output; raise InputError if a run fails.

    When all have had a turn, a line says how long the rest takes. ``later`` returns the seconds of what follows these
    commands, from the seconds that each of them takes.
    """
    width = max(map(len, commands))
    runs: list[Command] = []
    try:
        for name, arguments in commands.items():
            runs.append(Command(name, arguments, width, logs))
        running = list(runs)
        while running:
            running = [run for run in running if run.turn(is_alone=len(running) == 1)]
            seconds_left = {run.name: run.seconds_left() for run in runs}
            known_seconds = {name: seconds for name, seconds in seconds_left.items() if seconds is not None}
            if running and len(known_seconds) == len(runs):
                total_seconds = {run.name: run.spent + known_seconds[run.name] for run in runs}
                say(f"about {clock(sum(known_seconds.values()) + later(total_seconds))} left")
    finally:
        for run in runs:
            run.process.kill()  # SIGKILL also ends a stopped process
            run.process.wait()
    for run in runs:
        run.reader.join()

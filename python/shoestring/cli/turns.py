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
from pathlib import Path

from shoestring.core.errors import InputError

# Seconds per turn. A turn is several steps long, so the one step interrupted by a pause does not move the
# median.
TURN = 12.0
SPEED = re.compile(r"[\d,]+ tok/s")  # of a step, in a line of a run


def run_in_turns(commands: dict[str, list[str]], logs: Path) -> None:
    """Run `shoestring ARGUMENTS` for each name and print its output; raise InputError if a run fails."""
    width = max(map(len, commands))
    # Waiting OpenMP threads sleep. On a shared machine, spinning threads take CPU time from working threads.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    running: dict[str, subprocess.Popen[str]] = {}
    # Runs that went on after a pause, and have not printed a speed since.
    paused: set[str] = set()
    readers = []
    try:
        for name, arguments in commands.items():
            with open(logs / f"{name}.err", "w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "shoestring.cli", *arguments],
                    stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                )  # fmt: skip
            process.send_signal(signal.SIGSTOP)
            running[name] = process
            readers.append(threading.Thread(target=_show, args=(name, width, process, paused), daemon=True))
            readers[-1].start()
        first_turn = True
        while running:
            for name in list(running):
                if not first_turn:
                    paused.add(name)
                _turn(name, running, logs)
            first_turn = False
    finally:
        for process in running.values():
            process.kill()  # SIGKILL also ends a stopped process
            process.wait()
    for reader in readers:
        reader.join()


def _turn(name: str, running: dict[str, subprocess.Popen[str]], logs: Path) -> None:
    process = running[name]
    process.send_signal(signal.SIGCONT)
    try:
        code = process.wait(timeout=TURN if len(running) > 1 else None)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGSTOP)
        return
    del running[name]
    if code != 0:
        lines = (logs / f"{name}.err").read_text().strip().splitlines() or [""]
        raise InputError(f"demo: the run {name} ended with exit code {code}: {lines[-1]}")


def _show(name: str, width: int, process: subprocess.Popen[str], paused: set[str]) -> None:
    """Print the lines of a run. The speed of a step within which the run was paused is not shown."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.rstrip()
        if name in paused and SPEED.search(text):
            paused.discard(name)
            text = SPEED.sub("(paused)", text)
        print(f"{name:>{width}} | {text}", flush=True)

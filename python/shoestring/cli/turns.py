"""Several commands at once, of which only one runs at a time, in turns.

A machine's speed drifts within minutes. Runs that take turns every few seconds meet the same drift, so that their
median step times can be compared; each is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from shoestring.core.errors import InputError

TURN = (
    12.0  # seconds: several steps long, so that the one step that a pause falls into does not move the median
)


def run_in_turns(commands: dict[str, list[str]], logs: Path) -> None:
    """Run `shoestring ARGUMENTS` for each name to its end, showing its lines; raises InputError if one fails."""
    width = max(map(len, commands))
    # Waiting threads sleep: where others use the machine too, threads that spin take the time of those that work.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    running: dict[str, subprocess.Popen[str]] = {}
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
            readers.append(threading.Thread(target=_show, args=(f"{name:>{width}} | ", process), daemon=True))
            readers[-1].start()
        while running:
            for name in list(running):
                _turn(name, running, logs)
    finally:
        for process in running.values():
            process.kill()  # also ends a stopped process
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


def _show(prefix: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(prefix + line.rstrip(), flush=True)

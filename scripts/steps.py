"""Run steps, each with a time limit. If a step fails or hangs, the next one runs all the same.

Steps run in order. Consecutive steps with ``together=True`` run side by side.
"""

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path


class Failed(Exception):
    """Raised when a step failed; the text says why in one line."""


class Skipped(Exception):
    """Raised when a step is skipped, because the machine lacks something that the step needs."""


@dataclass(frozen=True)
class Step:
    """One step of a check.

    Args:
        work: does the step and returns one line about the result; raises Failed or Skipped.
        limit: time limit in seconds.
        needs: name of a step that must have passed before.
        together: whether the step may run beside the steps before and after it that have this flag, too.
    """

    name: str
    work: Callable[[], str]
    limit: float
    needs: str | None = None
    together: bool = False


@dataclass(frozen=True)
class Result:
    name: str
    status: str  # status of the step: "passed", "failed" or "skipped"
    seconds: float
    note: str


def _kill(process: subprocess.Popen) -> None:
    """Kill a command and its child processes: the command runs in a process group of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Current(threading.local):
    """The log file and the end time of the step that the current thread runs."""

    log: Path
    end: float


class Runner:
    """Runs steps and their commands, within each step's time limit and the total ``budget`` in seconds.

    At most ``workers`` steps run side by side.
    """

    def __init__(self, logs: Path, budget: float, workers: int = 1) -> None:
        self.logs = logs
        self.end = time.monotonic() + budget
        self.workers = workers
        self.results: list[Result] = []
        self._current = Current()
        self._current.log, self._current.end = logs / "log", self.end
        self._processes: set[subprocess.Popen] = set()
        logs.mkdir(parents=True, exist_ok=True)

    def command(
        self, arguments: Sequence[object], env: Mapping[str, str] | None = None, ok: tuple[int, ...] = (0,)
    ) -> str:
        """Run a command and return its output (stdout and stderr), which also goes to the step's log.

        Raises:
            Failed: the exit status is not in `ok`, the command hit the time limit, or it could not start.
        """
        path = self._current.log
        start = path.stat().st_size if path.exists() else 0
        name = Path(str(arguments[0])).name
        with path.open("ab") as log:
            try:
                process = subprocess.Popen(
                    [str(a) for a in arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise Failed(f"{name} could not be started: {error.strerror}") from None
            self._processes.add(process)
            try:
                status = process.wait(max(0.1, self._current.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self._processes.discard(process)
                _kill(process)
        output = path.read_bytes()[start:].decode(errors="replace")
        last = next(
            (line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing"
        )
        if status is None:
            raise Failed(f"{name} was stopped at its time limit; its last line: {last}")
        if status not in ok:
            raise Failed(f"{name} ended with status {status}: {last}")
        return output

    def run(self, steps: Sequence[Step], after: Callable[[], None] = lambda: None) -> None:
        """Run all steps, and call `after` after each of them."""
        for together, group in itertools.groupby(steps, lambda step: step.together):
            pool = ThreadPoolExecutor(self.workers if together else 1)
            try:
                for done in as_completed([pool.submit(self._run, step) for step in group]):
                    result, text = done.result()
                    print(f"== {result.name}\n{text}", end="")
                    print(f"{result.status} ({result.seconds:.1f} s): {result.note}", flush=True)
                    after()
            except BaseException:
                for process in tuple(self._processes):
                    _kill(process)
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    def _run(self, step: Step) -> tuple[Result, str]:
        """Run a step and record its result; return it, and the end of the step's log if it failed.

        The result is recorded before the next step starts, which may need it.
        """
        result, text = self._result(step)
        self.results.append(result)
        return result, text

    def _result(self, step: Step) -> tuple[Result, str]:
        start = time.monotonic()
        passed = {r.name for r in self.results if r.status == "passed"}
        if step.needs is not None and step.needs not in passed:
            return Result(step.name, "skipped", 0.0, f"needs the step {step.needs}"), ""
        if self.end - start < 3:
            return Result(step.name, "skipped", 0.0, "no time was left; --budget-minutes gives more"), ""
        log = self.logs / (re.sub(r"\W+", "_", step.name) + ".log")
        log.unlink(missing_ok=True)
        self._current.log, self._current.end = log, min(self.end, start + step.limit)
        text = ""
        try:
            status, note = "passed", step.work()
        except Skipped as reason:
            status, note = "skipped", str(reason)
        except Failed as reason:
            status, note = "failed", str(reason)
            if log.exists():
                text = "".join(f"{line}\n" for line in log.read_text(errors="replace").splitlines()[-25:])
        except Exception as error:  # an unexpected exception in one step must not stop the next step
            status, note = "failed", f"{type(error).__name__}: {error}"
        return Result(step.name, status, time.monotonic() - start, note.replace("\n", " ")), text

    def table(self) -> str:
        """Return a table with status, time and note of each step, and with the number of steps per status."""
        width = max(len(r.name) for r in self.results)
        lines = [f"{r.name:{width}}  {r.status:7} {r.seconds:7.1f} s  {r.note}" for r in self.results]
        counts = [f"{sum(r.status == s for r in self.results)} {s}" for s in ("passed", "failed", "skipped")]
        return "\n".join([*lines, f"{', '.join(counts)}, {sum(r.seconds for r in self.results):.0f} s"])

    @property
    def failed(self) -> bool:
        return any(r.status == "failed" for r in self.results)

"""Run steps in order, each with a time limit. If a step fails or hangs, the next one runs all the same."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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
    """

    name: str
    work: Callable[[], str]
    limit: float
    needs: str | None = None


@dataclass(frozen=True)
class Result:
    name: str
    status: str  # status of the step: "passed", "failed" or "skipped"
    seconds: float
    note: str


class Runner:
    """Runs steps and their commands, within each step's time limit and the total ``budget`` in seconds."""

    def __init__(self, logs: Path, budget: float) -> None:
        self.logs = logs
        self.end = time.monotonic() + budget
        self.results: list[Result] = []
        self._step_end = self.end
        self._log = logs / "log"
        logs.mkdir(parents=True, exist_ok=True)

    def command(
        self, arguments: Sequence[object], env: Mapping[str, str] | None = None, ok: tuple[int, ...] = (0,)
    ) -> str:
        """Run a command and return its output (stdout and stderr), which also goes to the step's log.

        Raises:
            Failed: the exit status is not in `ok`, the command hit the time limit, or it could not start.
        """
        start = self._log.stat().st_size if self._log.exists() else 0
        name = Path(str(arguments[0])).name
        with self._log.open("ab") as log:
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
            try:
                status = process.wait(max(0.1, self._step_end - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    # The command runs in its own process group, so killing the group also ends its child
                    # processes.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output = self._log.read_bytes()[start:].decode(errors="replace")
        last = next(
            (line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing"
        )
        if status is None:
            raise Failed(f"{name} was stopped at its time limit; its last line: {last}")
        if status not in ok:
            raise Failed(f"{name} ended with status {status}: {last}")
        return output

    def run(self, steps: Sequence[Step], after: Callable[[], None] = lambda: None) -> None:
        """Run all steps in order, and call `after` after each of them."""
        for step in steps:
            print(f"== {step.name}", flush=True)
            start = time.monotonic()
            result = self._run(step, start)
            self.results.append(result)
            print(f"{result.status} ({result.seconds:.1f} s): {result.note}", flush=True)
            after()

    def _run(self, step: Step, start: float) -> Result:
        passed = {r.name for r in self.results if r.status == "passed"}
        if step.needs is not None and step.needs not in passed:
            return Result(step.name, "skipped", 0.0, f"needs the step {step.needs}")
        if self.end - start < 3:
            return Result(step.name, "skipped", 0.0, "no time was left; --budget-minutes gives more")
        self._step_end = min(self.end, start + step.limit)
        self._log = self.logs / (re.sub(r"\W+", "_", step.name) + ".log")
        self._log.unlink(missing_ok=True)
        try:
            status, note = "passed", step.work()
        except Skipped as reason:
            status, note = "skipped", str(reason)
        except Failed as reason:
            status, note = "failed", str(reason)
            if self._log.exists():
                print("\n".join(self._log.read_text(errors="replace").splitlines()[-25:]))
        except Exception as error:  # an unexpected exception in one step must not stop the next step
            status, note = "failed", f"{type(error).__name__}: {error}"
        return Result(step.name, status, time.monotonic() - start, note.replace("\n", " "))

    def table(self) -> str:
        """Return a table with status, time and note of each step, and with the number of steps per status."""
        width = max(len(r.name) for r in self.results)
        lines = [f"{r.name:{width}}  {r.status:7} {r.seconds:7.1f} s  {r.note}" for r in self.results]
        counts = [f"{sum(r.status == s for r in self.results)} {s}" for s in ("passed", "failed", "skipped")]
        return "\n".join([*lines, f"{', '.join(counts)}, {sum(r.seconds for r in self.results):.0f} s"])

    @property
    def failed(self) -> bool:
        return any(r.status == "failed" for r in self.results)

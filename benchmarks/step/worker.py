"""Run one candidate in a process of its own, which answers commands of bench_step.py as lines of JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

MIB = 2**20


class Failed(Exception):
    """The candidate cannot run; the text says why."""


class Worker:
    """A process that holds one candidate.

    Args:
        case, candidate: names in CASES and in its candidates.
        options: "scale", "threads", "folder", and arguments of ``make``.
    """

    def __init__(self, case: str, candidate: str, options: dict[str, Any]) -> None:
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.step.worker"]
        self.process = subprocess.Popen(
            [*command, json.dumps({**options, "case": case, "candidate": candidate})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            # Inductor then names each of its kernels to the profiler.
            env=os.environ | {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"},
            cwd=Path(__file__).parents[2],
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command, and return its result. Raises Failed with the worker's reason."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.errors.seek(0)
            last = ["", *self.errors.read().strip().splitlines()][-1]
            raise Failed(f"the process ended with status {self.process.wait()}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


class Server:
    """The commands of a worker."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from benchmarks.step import cases

        torch.set_num_threads(options["threads"])
        self.cases = cases
        self.case = cases.CASES[options["case"]]
        self.candidate = self.case.candidates[options["candidate"]]
        self.scale = options["scale"]
        self.folder = Path(options["folder"]) if options.get("folder") else None
        for module in ("shoestring", "transformers", *(("peft",) if self.case.family == "qlora" else ())):
            importlib.import_module(module)
        self.cases.language_model("llama", "quick")  # imports the modules that transformers loads late
        self.imports = _memory("VmRSS")

    def prepare(self, **arguments: Any) -> dict[str, Any]:
        """Build the task, and take steps until a step takes no longer than the steps before it."""
        self.task = self.cases.make(self.case, self.candidate, self.scale, self.folder, **arguments)
        seconds: list[float] = []
        while len(seconds) < 3 or (seconds[-1] > 1.25 * min(seconds[1:-1]) and len(seconds) < 8):
            seconds.append(self.time())
        peak = _memory("VmHWM")
        # The mark then starts anew, so that it is the peak of steps, without loading and compilation.
        Path("/proc/self/clear_refs").write_text("5")
        return {"notes": self.task.notes, "first step": seconds[0], "peak of warm-up": peak}

    def time(self) -> float:
        """Return the seconds of one step."""
        start = time.perf_counter()
        self.task.step()
        return time.perf_counter() - start

    def memory(self) -> dict[str, int]:
        return {"imports": self.imports, "peak": _memory("VmHWM")}

    def profile(self, steps: int) -> dict[str, Any]:
        from benchmarks.step.where import profile

        return profile(self.task.step, steps)

    def losses(self, steps: int, **arguments: Any) -> list[float]:
        """Train a new model, and return its losses."""
        task = self.cases.make(self.case, self.candidate, self.scale, self.folder, **arguments)
        return [task.step() for _ in range(steps)]

    def record(self) -> dict[str, Any]:
        """Record the products of a step and prepare to time them; the model is freed."""
        from benchmarks.step.products import Ceiling, Recorder

        task = self.cases.make(self.case, self.candidate, self.scale, self.folder)
        task.step()
        with Recorder() as recorder:
            task.step()
        del task
        self.ceiling = Ceiling(recorder)
        return {
            "flops": self.ceiling.flops,
            "count": self.ceiling.count,
            "chosen": dict(self.ceiling.chosen),
            "rows": self.ceiling.rows,
        }

    def products(self) -> float:
        """Return the seconds of all products of a step."""
        return self.ceiling.seconds()


def _memory(field: str) -> int:
    """Return a field of the memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    # Libraries may print to stdout; their text goes to stderr, and only answers go to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server(json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(server, request.pop("do"))(**request)}
        except Exception as error:  # the table names the reason, and other candidates go on
            traceback.print_exc()
            reason = next((text for text in str(error).splitlines() if text.strip()), "")
            answer = {"error": f"{type(error).__name__}: {reason}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

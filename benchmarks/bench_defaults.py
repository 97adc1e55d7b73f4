"""Compare a run without options with the best of a grid of options: training and fine-tuning of a small model.

Each configuration trains in a process of its own until it has enough steps. All run once, in a random order. Then the
fastest ones and the run without options take turns for some rounds. "times ours" is the median over these rounds of the
tokens/s of the run without options divided by those of the configuration: at least 0.95 for each is the aim.

    python -m benchmarks.bench_defaults [--only train|finetune] [--data FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shoestring  # noqa: F401  (registers the operator that Report asks for)
from benchmarks.common import Report, arguments

FASTEST = 3  # configurations of the grid that take turns with the default
SECONDS = 4.0  # time of training that counts
LEAST, SKIPPED = 4, 2  # steps that count at least, and the first ones, which do not
ROWS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # rows of a micro-batch, micro-batches; each step has 8 rows
ROOT = Path(__file__).resolve().parents[1]
LONG = ["--steps", 100_000, "--eval-every", 10**6, "--checkpoint-every", 10**6]  # no run ends by itself


@dataclass
class Task:
    """A command with the options of what is trained, and the options of each configuration by its name."""

    name: str
    command: list[object]
    grid: dict[str, list[object]] = field(default_factory=dict)

    def add(self, *options: object) -> None:
        """Add a configuration, which plans nothing."""
        self.grid[" ".join(map(str, options)).replace("--", "")] = ["--device-memory", "none", *options]


def rows(number: int, times: int) -> list[object]:
    return ["--batch-size", number, "--accumulate", times]


def training(folder: Path, data: Path) -> Task:
    """Return the task of training a Llama of 6 M parameters."""
    task = Task(
        "train", ["train", "--data", data, "--preset", "small", "--tokenizer", folder / "base/tokenizer"]
    )
    for precision, (number, times) in itertools.product(("fp32", "bf16"), ROWS):
        task.add("--precision", precision, *rows(number, times))
    for more in (
        ["--activations", "recompute"], ["--optimizer-state", "fp32"], ["--optimizer-state", "4bit"],
        ["--step-in-backward", "--clip", 0], ["--no-host-allocator"], ["--compile"], ["--threads", 1],
    ):  # fmt: skip
        task.add("--precision", "bf16", *rows(8, 1), *more)
    return task


def finetuning(folder: Path) -> Task:
    """Return the task of adapters for a Llama of 30 M parameters, with questions and answers of unequal lengths."""
    task = Task("finetune", ["finetune", "--model", folder / "base/model", "--data", folder / "pairs.jsonl"])
    for (number, times), kept in itertools.product(ROWS, ("nf4", "none")):
        task.add("--precision", "bf16", *rows(number, times), "--quantize", kept)
    for (number, times), kept in itertools.product((ROWS[0], ROWS[2]), ("nf4", "none")):
        task.add("--precision", "fp32", *rows(number, times), "--quantize", kept)
    for more in (
        ["--quantize", "int8"], ["--pack", "none"], ["--activations", "recompute"], ["--no-host-allocator"],
        ["--compile", "--pack", "none"], ["--optimizer-state", "fp32"],
    ):  # fmt: skip
        task.add("--precision", "bf16", *rows(8, 1), *more)
    return task


def prepare(folder: Path, data: Path) -> None:
    """Write a model with its tokenizer, and pairs of questions and answers."""
    text = data.read_text()
    base = ["train", "--data", data, "--preset", "medium", "--vocab-size", 4096]
    base += ["--steps", 1, "--seq-len", 64]
    command = [sys.executable, "-m", "shoestring.cli", *map(str, [*base, "--out", folder / "base"])]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    drawn = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(2000):
            begin, length = drawn.randrange(len(text) - 4000), drawn.randint(200, 1800)
            pair = {
                "prompt": text[begin : begin + 200],
                "completion": text[begin + 200 : begin + 200 + length],
            }
            file.write(json.dumps(pair) + "\n")


def speed(task: Task, options: list[object], folder: Path, seconds: float) -> float | None:
    """Train for some seconds; return the tokens per second, or None if the run fails."""
    out = folder / "run"
    command = [*map(str, [*task.command, *LONG, *options, "--out", out])]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoestring.cli", *command], cwd=ROOT, stdout=output, stderr=output
        )
    try:
        while process.poll() is None:
            time.sleep(0.1)
            steps = _steps(out / "metrics.jsonl")[SKIPPED:]
            if len(steps) >= LEAST and sum(step["seconds"] for step in steps) >= seconds:
                return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
        return None
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(out, ignore_errors=True)


def _steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def said(folder: Path) -> str:
    """Return what the last run has said of its choices."""
    lines = (folder / "output.txt").read_text().splitlines()
    return "\n".join(f"  {line}" for line in lines if line.startswith(("plan: ", "--precision auto")))


def compare(task: Task, folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Run the grid once, and then the fastest configurations in turn with the run without options."""
    seconds = 0.5 if options.quick else SECONDS
    grid = dict(itertools.islice(task.grid.items(), 2)) if options.quick else task.grid
    found: dict[str, float] = {}
    for name in random.Random(0).sample(list(grid), len(grid)):
        rate = speed(task, grid[name], folder, seconds)
        if rate is not None:
            found[name] = rate
        print(f"  {name}: " + ("failed" if rate is None else f"{rate:,.0f} tokens/s"), flush=True)
    best = sorted(found, key=lambda name: -found[name])[:FASTEST]
    times: dict[str, list[float]] = {name: [] for name in ("no options", *best)}
    for turn in range(options.repeats):
        for name in times if turn % 2 else reversed(times):
            rate = speed(task, grid.get(name, []), folder, seconds)
            if rate is None:
                raise RuntimeError(f"{name}: {(folder / 'output.txt').read_text()}")
            times[name].append(1 / rate)
            if name == "no options":
                print(said(folder), flush=True)
    report.table(
        f"{task.name}: no options, and the fastest of {len(found)} configurations", times, 1, "tokens/s"
    )
    ratios = [statistics.median(b / a for a, b in zip(times["no options"], times[name])) for name in best]
    print(f"{task.name}: no options at {min(ratios):.3f} of the fastest configuration", flush=True)


def more_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["train", "finetune"], help="one of the two tasks")
    parser.add_argument(
        "--data", type=Path, help="a text of about 1 MB; by default the sources of shoestring"
    )


def main() -> None:
    options = arguments(__doc__.partition("\n")[0], more=more_arguments)
    report = Report("defaults", options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data
        if data is None:
            data = folder / "text.txt"
            sources = sorted((ROOT / "python/shoestring").rglob("*.py"))
            data.write_text("\n".join(path.read_text() for path in sources))
        prepare(folder, data)
        tasks = [training(folder, data), finetuning(folder)]
        assert sum(len(task.grid) for task in tasks) <= 60
        for task in tasks:
            if options.only in (None, task.name):
                compare(task, folder, options, report)
    report.finish()


if __name__ == "__main__":
    main()

"""Kill training processes at random times and resume them. The results must equal those without kills.

The final weights and the losses must be bitwise equal to those of a run without kills. The tested training
programs are listed in PROGRAMS. `pytest tests/crash/test_random_kills.py --kills 1000` is the full test. It
prints one line for each training program.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli_helpers import TINY, TUNE, losses, succeed, text
from cli_server import Commands
from cpp_examples import ENVIRONMENT, build_example, learnable_tokens, token_file

STEPS = ["--steps", "10", "--checkpoint-every", "1"]
SMALL = ["--layers", "2", "--hidden", "128", "--heads", "2", "--kv-heads", "2", "--batch-size", "4", "--threads", "1",
         "--seq-len", "32", "--steps", "40", "--checkpoint-every", "1"]  # fmt: skip
PROGRAMS = ("train", "finetune", "finetune --baseline", "train_gpt")


@dataclass
class Program:
    """A training program: how to start or resume it, wait for its end, and find the files that it wrote."""

    # called with (folder of the run, log file); returns a process id
    start: Callable[[Path, Path], int]
    wait: Callable[[int], int]
    result: Callable[[Path], list[Path]]  # returns the weight files of a finished run, given its folder
    # Pattern of the files that exist in the folder of a run while it writes a checkpoint.
    unfinished: str
    curve: Callable[[Path], object]


@dataclass
class Report:
    kills: int = 0
    within_checkpoint: int = 0
    bitwise: int = 0
    failures: list[str] = field(default_factory=list)
    # Maximum time from the start of a training program to a kill, in seconds. It is reduced if the program
    # ends earlier.
    longest: float = 1.0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.within_checkpoint} of them within a checkpoint; {self.bitwise} runs resumed "
            f"bitwise, {len(self.failures)} failures"
        )


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as server:
        yield server


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text(text())
    succeed(
        "train", "--data", folder / "text.txt", "--out", folder / "base", *TINY, "--steps", "1", "--baseline"
    )
    return folder


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, commands: Commands, inputs: Path) -> Program:
    name, data = request.param, inputs / "text.txt"
    if name == "train_gpt":
        return _cpp_program(inputs)
    arguments: list[object] = ["train", "--data", data, *TINY, *STEPS]
    if name != "train":
        arguments = [
            "finetune",
            "--model",
            inputs / "base" / "model",
            "--data",
            data,
            *TUNE,
            *STEPS,
            "--val-fraction",
            0.2,
        ]
    if name == "finetune --baseline":
        arguments += ["--baseline", "--quantize", "none"]
    result = "model" if name == "train" else "adapter"
    return Program(
        lambda out, log: commands.start(*arguments, "--out", out, "--resume", log=log),
        commands.wait,
        lambda out: sorted((out / result).glob("*.safetensors")),
        "checkpoints/*.partial",
        losses,
    )


def _cpp_program(inputs: Path) -> Program:
    program, data = (
        build_example("train_gpt"),
        token_file(inputs / "tokens.bin", learnable_tokens(20_000, 512)),
    )
    running: dict[int, subprocess.Popen[bytes]] = {}

    def start(out: Path, log: Path) -> int:
        resume = ["--resume"] if list(out.glob("checkpoint-*.safetensors")) else []
        command = [program, "--data", data, "--out", out, *SMALL, *resume]
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)
        running[process.pid] = process
        return process.pid

    return Program(
        start,
        lambda process: running.pop(process).wait(),
        lambda out: [out / "model.safetensors", out / "checkpoint-40.safetensors"],
        "checkpoint-*.tmp*",
        lambda out: None,
    )


def test_killed_runs_end_with_the_same_bits(
    program: Program,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = max(1, request.config.getoption("--kills") // len(PROGRAMS))
    whole, log = tmp_path / "whole", tmp_path / "log"
    assert program.wait(program.start(whole, log)) == 0, log.read_text()
    rng, report = random.Random(seed), Report()
    while report.kills < kills:
        out = tmp_path / "run"
        try:
            _run_killed(program, out, log, rng, min(kills, report.kills + rng.randint(1, 8)), report)
            _require_same(program, out, whole)
            report.bitwise += 1
        except AssertionError as error:
            report.failures.append(f"{error}")
            shutil.copytree(out, tmp_path / f"failed-{len(report.failures)}")
        shutil.rmtree(out, ignore_errors=True)
    with capsys.disabled():
        print(f"\n{request.node.callspec.id}: {report}")
    assert not report.failures, report.failures


def _run_killed(
    program: Program, out: Path, log: Path, rng: random.Random, kills: int, report: Report
) -> None:
    """Run a training program to its end. Kill and resume it until the report counts ``kills`` kills.

    The times of the kills are random. Every second kill comes within milliseconds after the program has begun
    to write a checkpoint.
    """
    while True:
        began = time.monotonic()
        process = program.start(out, log)
        if report.kills < kills:
            time.sleep(rng.uniform(0, report.longest))
            end = time.monotonic() + (report.longest if report.kills % 2 else 0)
            while time.monotonic() < end and not any(out.glob(program.unfinished)):
                pass
            if report.kills % 2:
                time.sleep(rng.choice((0.0, 0.001, 0.004)))
            # SIGKILL has no effect on a process that has ended but that its parent has not waited for.
            os.kill(process, signal.SIGKILL)
        code = program.wait(process)
        if code == 0:
            report.longest = min(report.longest, time.monotonic() - began)
            return
        assert code == -signal.SIGKILL, f"exit code {code}: {log.read_text()}"
        report.kills += 1
        report.within_checkpoint += any(out.glob(program.unfinished))


def _require_same(program: Program, out: Path, whole: Path) -> None:
    assert program.curve(out) == program.curve(whole), "the losses differ"
    found, expected = program.result(out), program.result(whole)
    assert [path.name for path in found] == [path.name for path in expected] and found, "the files differ"
    for path, other in zip(found, expected):
        tensors, others = load_file(path), load_file(other)
        assert tensors.keys() == others.keys(), path.name
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), f"{path.name}: {name} differs"
    left = [*out.rglob("*.partial"), *out.rglob("*.tmp*"), *out.rglob(".lock")]
    assert not left, f"left behind: {left}"

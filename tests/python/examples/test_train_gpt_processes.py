"""The C++ example train_gpt trains on several processes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cpp_examples import (
    SMALL,
    build_example,
    learnable_tokens,
    losses,
    refused,
    token_file,
    train,
    validation_loss,
)
from cpp_processes import finish, skip_without_gloo, start

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
# With four processes, one of them has no row of the last batch of a validation.
STEPS = ["--steps", "10", "--eval-every", "4", "--val-fraction", "0.03", "--threads", "1"]


@pytest.fixture(autouse=True, scope="module")
def _needs_gloo() -> None:
    skip_without_gloo()


@pytest.fixture(scope="module")
def program() -> Path:
    return build_example("train_gpt")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("data") / "tokens.bin", learnable_tokens(20_000, 512))


@pytest.fixture(scope="module")
def alone(program: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train in one process, once for all tests that compare with it."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    done = train(program, data, out, *STEPS)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def together(ranks: int, program: Path, data: Path, out: Path, *options: str) -> str:
    """Train in several processes, of which only the first says something; return what it prints."""
    (first, *others) = finish(
        start(ranks, "--data", data, "--out", out, *SMALL, *STEPS, *options, program=program)
    )
    assert first[0] == 0 and all(done == (0, "", "") for done in others), (first, others)
    return first[1]


def curve(output: str) -> list[float]:
    """Return the losses, the last validation loss within the run, and that after the run."""
    within = [line.split("  val ")[1].split()[0] for line in output.splitlines() if "  val " in line]
    return [*losses(output), *map(float, within), validation_loss(output)]


def assert_equal(run: Path, other: Path, step: int) -> None:
    """Compare two checkpoints and two models, bit for bit."""
    for name in (f"checkpoint-{step}", "model"):
        own, its = (load_file(folder / f"{name}.safetensors") for folder in (run, other))
        assert own.keys() == its.keys()
        assert all(torch.equal(tensor, its[key]) for key, tensor in own.items())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sample(5)
def test_losses_are_those_of_one_process(
    program: Path, data: Path, alone: tuple[Path, str], tmp_path: Path, strategy: str, ranks: int
) -> None:
    """The files have the same tensors, and one process has the same bits."""
    printed = together(ranks, program, data, tmp_path / "run", "--parallel", strategy)
    # Losses are printed with four decimals. Sums of gradients have another order.
    assert curve(printed) == pytest.approx(curve(alone[1]), abs=2e-4)
    assert printed.count("step ") == 10 and ("peak of the processes: " in printed) == (ranks > 1)
    if ranks == 1:
        assert_equal(tmp_path / "run", alone[0], 10)
    for name in ("checkpoint-5", "model"):
        own, its = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path / "run", alone[0]))
        assert {k: (t.shape, t.dtype) for k, t in own.items()} == {
            k: (t.shape, t.dtype) for k, t in its.items()
        }
    assert {path.name for path in (tmp_path / "run").iterdir()} == {p.name for p in alone[0].iterdir()}


OPTIONS = [
    ("ddp", ["--accumulate", "3"]),
    ("zero2", ["--accumulate", "3"]),
    ("zero3", ["--accumulate", "3", "--activations", "recompute"]),
    ("zero3", ["--activations", "offload", "--offload", "stream"]),
    ("zero2", ["--activations", "recompute", "--clip", "0"]),
    ("ddp", ["--memory-budget", "1MiB", "--precision", "fp16"]),
    ("zero1", ["--optimizer", "muon"]),
    ("zero3", ["--optimizer", "muon"]),
    ("zero1", ["--optimizer", "schedule-free-adamw"]),
    ("zero3", ["--optimizer", "schedule-free-adamw"]),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sample(1)
def test_gradients_in_few_bits(
    program: Path, data: Path, alone: tuple[Path, str], tmp_path: Path, strategy: str
) -> None:
    """Losses are near those of whole gradients, and not the same."""
    printed = together(2, program, data, tmp_path / "run", "--parallel", strategy, "--compress", "8bit")
    assert curve(printed) == pytest.approx(curve(alone[1]), rel=0.02)
    assert curve(printed) != pytest.approx(curve(alone[1]), abs=2e-5)


@pytest.mark.parametrize(("strategy", "options"), OPTIONS)
@pytest.mark.sample(3)
def test_options(program: Path, data: Path, tmp_path: Path, strategy: str, options: list[str]) -> None:
    one = train(program, data, tmp_path / "one", *STEPS, *options)
    assert one.returncode == 0, one.stderr
    printed = together(2, program, data, tmp_path / "two", "--parallel", strategy, *options)
    # Muon's product is computed in bf16, and each process rounds fp16 products of its own rows.
    tolerance = 2e-3 if {"muon", "fp16"} & set(options) else 2e-4
    assert curve(printed) == pytest.approx(curve(one.stdout), abs=tolerance)


def test_split_memory(program: Path, data: Path, tmp_path: Path) -> None:
    """Each strategy takes less memory in its steps than the one before.

    W, G and S are 105, 105 and 210 MiB here. Each of four processes saves 158 MiB of S, 79 of G and 79 of W. Buffers of
    the collectives, of 20 MiB with zero1, take a part of that.
    """
    wide = "--hidden 512 --layers 8 --kv-heads 4 --optimizer-state fp32 --batch-size 4 --seq-len 8 --steps 3"
    command = ["--data", data, *SMALL, *STEPS, *wide.split(), "--host-allocator"]
    peaks = []
    for strategy in STRATEGIES:
        processes = start(4, *command, "--out", tmp_path / strategy, "--parallel", strategy, program=program)
        assert processes[0].stdout is not None
        line = next(line for line in processes[0].stdout if line.startswith("step 2/3"))
        peaks.append(int(line.split("peak ")[1].split()[0]))
        for process in processes:  # a checkpoint would be larger than the steps
            process.kill()
        finish(processes)
    assert all(after < before - 8 for before, after in itertools.pairwise(peaks)), peaks


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero1", 2), ("zero2", 4), ("zero3", 4)])
@pytest.mark.sample(2)
def test_resumed_run_has_the_same_bits(
    program: Path, data: Path, tmp_path: Path, strategy: str, ranks: int
) -> None:
    out, again = tmp_path / "run", tmp_path / "again"
    printed = together(ranks, program, data, out, "--parallel", strategy)
    again.mkdir()
    shutil.copy(out / "checkpoint-5.safetensors", again)
    resumed = together(ranks, program, data, again, "--parallel", strategy, "--resume")
    assert "from step 5" in resumed and losses(resumed) == losses(printed)[5:]
    assert_equal(again, out, 10)


def test_another_number_of_processes_continues_the_run(
    program: Path, data: Path, alone: tuple[Path, str], tmp_path: Path
) -> None:
    """One process, then four with split weights, then two with split state, and one again."""
    out, found = tmp_path / "run", []
    for ranks, strategy, last in ((1, "none", 2), (4, "zero3", 5), (2, "zero1", 8), (1, "none", 10)):
        # The run is stopped by its number of steps, which decides the result. So it is stopped by a signal.
        options = [
            *STEPS,
            "--parallel",
            strategy,
            *(["--resume"] if found else []),
            "--checkpoint-every",
            "1",
        ]
        processes = start(ranks, "--data", data, "--out", out, *SMALL, *options, program=program)
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            found += losses(line)
            if line.startswith(f"step {last}/") and last < 10:
                processes[-1].send_signal(signal.SIGTERM)
                break
        done = finish(processes)
        found += losses(done[0][1])
        assert {code for code, _, _ in done} == {143 if last < 10 else 0}, done
    assert found == pytest.approx(losses(alone[1]), abs=2e-4)


def test_a_signal_ends_all_processes(program: Path, data: Path, tmp_path: Path) -> None:
    """A signal to one process stops all of them after the same step, of which there is a checkpoint."""
    out = tmp_path / "out"
    options = ["--steps", "3000", "--parallel", "zero2", "--checkpoint-every", "10000"]
    processes = start(2, "--data", data, "--out", out, *SMALL, *options, program=program)
    assert processes[0].stdout is not None
    next(line for line in processes[0].stdout if line.startswith("step "))
    processes[1].send_signal(signal.SIGTERM)
    done = finish(processes)
    (path,) = out.glob("checkpoint-*")
    for code, _, errors in done:
        assert code == 143
        step = path.stem.split("-")[1]
        assert errors.splitlines()[-1] == f"train_gpt: checkpoint at step {step}, continue with --resume"


def test_a_killed_process(program: Path, data: Path, tmp_path: Path) -> None:
    """The other process names the one that has ended, and a resumed run has the bits of an undisturbed one."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ["--steps", "40", "--parallel", "zero2"]
    together(2, program, data, whole, *options)
    processes = start(2, "--data", data, "--out", out, *SMALL, *STEPS, *options, program=program)
    assert processes[0].stdout is not None
    next(line for line in processes[0].stdout if line.startswith("step 6/"))
    processes[1].kill()
    (code, _, errors), (killed, _, _) = finish(processes)
    assert (code, killed) == (2, -signal.SIGKILL)
    assert errors.startswith("train_gpt: error: rank 0 of 2: ") and errors.count("\n") == 1
    assert "rank 1 has ended or is stopped" in errors
    together(2, program, data, out, *options, "--resume")
    assert_equal(out, whole, 40)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--parallel", "fsdp"], "--parallel: expected none | ddp | zero1 | zero2 | zero3, got fsdp"),
        ([], "--parallel: expected ddp, zero1, zero2 or zero3 in a run of 2 processes, got none"),
        (
            ["--parallel", "ddp", "--batch-size", "7"],
            "--batch-size: expected a multiple of the 2 processes, which share the rows of a micro-batch, got 7",
        ),
        (["--parallel", "ddp", "--baseline"], "--parallel ddp: expected no --baseline, received both"),
        (["--parallel", "ddp", "--step-in-backward"], "--parallel ddp: expected no --step-in-backward"),
        (["--parallel", "zero1", "--offload", "cpu"], "--parallel zero1: expected no --offload cpu"),
        (["--parallel", "zero2", "--optimizer", "muon"], "--parallel zero2: expected no --optimizer muon"),
        (["--parallel", "zero2", "--precision", "fp16"], "--parallel zero2: expected no --precision fp16"),
        (["--parallel", "zero3", "--memory-budget", "1GiB"], "--parallel zero3: expected no --memory-budget 1GiB"),
        (["--parallel", "zero2", "--resume"], "there is no checkpoint to continue from"),
        (["--parallel", "zero3", "--lr", "1e30", "--clip", "0"], "; training stopped before the weights changed"),
        (["--parallel", "zero2", "--lr", "1e30", "--clip", "0"], "; training stopped before the weights changed"),
    ],
)  # fmt: skip
@pytest.mark.sample(5)
def test_bad_options(program: Path, data: Path, tmp_path: Path, options: list[str], part: str) -> None:
    """All processes end with exit code 2 and one line."""
    out = tmp_path / "out"
    for code, _, errors in finish(start(2, "--data", data, "--out", out, *SMALL, *options, program=program)):
        assert code == 2 and errors.startswith("train_gpt: error: ") and errors.count("\n") == 1, errors
        assert part in errors
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ({"RANK": "0"}, "the processes do not connect: init_process_group: MASTER_ADDR: expected the environment "),
        ({"RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK: expected a number from 0 to 1, received 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a number in the environment, as torchrun sets it, got two"),
    ],
)  # fmt: skip
def test_a_bad_environment(
    program: Path, data: Path, tmp_path: Path, place: dict[str, str], part: str
) -> None:
    environment = os.environ | {"WORLD_SIZE": "2"} | place
    out = tmp_path / "out"
    refused(train(program, data, out, "--parallel", "ddp", env=environment), part)
    assert not out.exists()


def test_one_process_without_torchrun(program: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        train(program, data, out, "--parallel", "zero2"),
        "--parallel zero2: expected processes that torchrun has",
    )
    assert not out.exists()


def test_a_file_that_one_process_cannot_have(program: Path, data: Path, tmp_path: Path) -> None:
    """If the first process may not use the folder, the others end, too."""
    out = tmp_path / "out"
    command = [program, "--data", data, "--out", out, *SMALL, "--steps", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGSTOP)
        options = ["--parallel", "zero1", "--resume"]
        first, second = finish(
            start(2, "--data", data, "--out", out, *SMALL, *options, program=program), seconds=30
        )
        process.kill()
    assert first[0] == second[0] == 2
    assert f"--out {out}: in use by process {process.pid}" in first[2]
    assert "; rank 0 has " in second[2] and second[2].count("\n") == 1


def test_each_row_is_read_by_one_process(program: Path, tmp_path: Path) -> None:
    """The process that reads a bad token names it, and the other one has not read it."""
    tokens = learnable_tokens(20_000, 512)
    tokens[5000] = 600
    path, out = token_file(tmp_path / "tokens.bin", tokens), tmp_path / "out"
    options = ["--parallel", "ddp", "--batch-size", "64", "--steps", "20"]
    done = finish(start(2, "--data", path, "--out", out, *SMALL, *options, program=program))
    errors = sorted(errors for _, _, errors in done)
    assert [code for code, _, _ in done] == [2, 2]
    assert "token 600 at position 5000 is outside the vocabulary" in errors[0], errors
    assert errors[1].startswith("train_gpt: error: rank ") and "token 600" not in errors[1], errors

"""Test `train` and `finetune` with --parallel in two processes of the CPU (Gloo)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_helpers import TINY, TUNE, losses, refuse, succeed, text, weights
from cli_server import Commands
from shoestring.files.atomic import PARTIAL

pytestmark = pytest.mark.usefixtures("blank_images")

STEPS = [
    "--accumulate",
    "4",
    "--steps",
    "6",
    "--eval-every",
    "3",
    "--checkpoint-every",
    "3",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture
def together(server: Commands, tmp_path: Path) -> Callable[..., None]:
    """Run a command in two processes with the environment of torchrun, of which only the first says something."""

    def run(*arguments: object, more_code: str = "") -> None:
        first, other = server.together(tmp_path, *arguments, code=more_code)
        assert (first.code, other.code) == (0, 0), first.errors + other.errors
        assert "report:" in first.out and other.out == ""

    return run


def assert_close(run: Path, other: Path) -> None:
    """Compare losses, norms and validation losses of two runs, which differ by the order of additions."""
    for mine, its in zip(losses(run), losses(other), strict=True):
        assert [x for x in mine if x is not None] == pytest.approx(
            [x for x in its if x is not None], rel=1e-3
        )


def assert_equal(run: Path, other: Path) -> None:
    """Compare losses, norms, validation losses and weights of two runs, bit for bit."""
    assert losses(run) == losses(other)
    own = weights(run / "model")
    for name, tensor in weights(other / "model").items():
        assert tensor.equal(own[name]), name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", "--data", data, "--out", out, *TINY, *STEPS)
    return out


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp", "auto"])
@pytest.mark.sample(2)
def test_train_is_that_of_one_process(
    strategy: str, data: Path, alone: Path, tmp_path: Path, together: Callable[..., None]
) -> None:
    """The processes share the micro-batches of a step, so losses and norms are those of one process."""
    out = tmp_path / "run"
    together("train", "--data", data, "--out", out, *TINY, *STEPS, "--parallel", strategy)
    assert_close(out, alone)
    own, other = weights(out / "model"), weights(alone / "model")
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.shape == other[name].shape and (tensor - other[name]).abs().max() < 5e-3
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert summary["processes"] == 2 and len(summary["peak_of_processes"]) == 2
    assert summary["parallel"] == ("ddp" if strategy == "auto" else strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.sample(1)
def test_resumed_run_is_bitwise_the_same(
    strategy: str, data: Path, tmp_path: Path, together: Callable[..., None]
) -> None:
    """The checkpoint of step 3 is continued to the same losses, norms and weights."""
    out, again = tmp_path / "run", tmp_path / "again"
    together("train", "--data", data, "--out", out, *TINY, *STEPS, "--parallel", strategy)
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints/step-00000006")
    shutil.rmtree(again / "model")
    together("train", "--data", data, "--out", again, *TINY, *STEPS, "--parallel", strategy, "--resume")
    assert_equal(again, out)


# Trials of the precision take 2 s in fp32, and in bf16 the seconds of each process.
TRIALS = """
from shoestring.training.run import precision
precision.LEAST_MICRO_BATCHES, precision.SECONDS, precision.SHARE = 1, 1000, 100
true = precision.run_pass
seconds = {seconds}[int(os.environ["RANK"])]
def run(trainer, name, batch):
    return true(trainer, name, batch)._replace(seconds=seconds if name == "bf16" else 2.0)
precision.run_pass = run
"""


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((0.5, 1.5), "bf16"), ((0.5, 3.0), "fp32"), ((9.0, 0.5), "fp32")]
)
@pytest.mark.sample(2)
def test_processes_choose_one_precision(
    seconds: tuple[float, float], chosen: str, data: Path, tmp_path: Path, together: Callable[..., None]
) -> None:
    """The slowest process decides, and the run has the bits of one with the option."""
    train = ["train", "--data", data, *TINY, *STEPS, "--parallel", "ddp"]
    code = TRIALS.format(seconds=seconds)
    together(*train, "--out", tmp_path / "auto", "--precision", "auto", more_code=code)
    assert json.loads((tmp_path / "auto/summary.json").read_text())["precision"] == chosen
    together(*train, "--out", tmp_path / "given", "--precision", chosen)
    assert_equal(tmp_path / "auto", tmp_path / "given")


def worker(marker: str, rank: int) -> int | None:
    """Return the number of the process of a rank, among those whose environment has the marker."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            values = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if marker.encode() in values and f"RANK={rank}".encode() in values:
            return int(folder.name)
    return None


def after_a_checkpoint(out: Path) -> bool:
    return (out / "checkpoints/step-00000003").exists()


def within_a_checkpoint(out: Path) -> bool:
    """Return whether rank 0 is writing a checkpoint, but not the first one."""
    return after_a_checkpoint(out) and any((out / "checkpoints").glob(f"*{PARTIAL}"))


@pytest.mark.parametrize(
    ("strategy", "moment", "killed"),
    [("zero2", after_a_checkpoint, 1), ("zero1", within_a_checkpoint, 0), ("zero3", None, None)],
)
@pytest.mark.sample(1)
def test_torchrun_continues_after_a_killed_process(
    strategy: str,
    moment: Callable[[Path], bool] | None,
    killed: int | None,
    data: Path,
    tmp_path: Path,
    together: Callable[..., None],
) -> None:
    """torchrun starts all processes again, which continue from the checkpoint, bit for bit.

    Without a moment, a random process ends at a random time, also before the first checkpoint.
    """
    # The kill comes early in these steps, also on a busy machine.
    command = ["train", "--data", data, *TINY, *STEPS, "--steps", "24", "--parallel", strategy]
    whole, again = tmp_path / "whole", tmp_path / "again"
    began = time.monotonic()
    together(*command, "--out", whole)
    chance = random.Random(torch.initial_seed())
    end = time.monotonic() + chance.uniform(0, 0.7 * (time.monotonic() - began))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "shoestring"]
    process = subprocess.Popen(
        [*torchrun, *map(str, [*command, "--out", again, "--resume"])],
        env=os.environ | {"RUN_OF_TEST": str(again)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rank = chance.randrange(2) if killed is None else killed
    is_killed = False
    try:
        while process.poll() is None and not (moment(again) if moment else time.monotonic() > end):
            time.sleep(0.0002 if moment is within_a_checkpoint else 0.01)
        while process.poll() is None:
            found = worker(f"RUN_OF_TEST={again}", rank)
            if found is not None:  # torchrun has started it
                os.kill(found, signal.SIGKILL)
                is_killed = True
                break
        printed = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 0, printed
    if not is_killed:
        pytest.skip("the run ended before the moment came")
    assert f"exitcode  : {-signal.SIGKILL}" in printed or f"exitcode: {-signal.SIGKILL}" in printed, printed
    assert "Traceback" not in printed, printed
    assert_equal(again, whole)


@pytest.mark.parametrize(
    ("strategy", "compress"),
    [("ddp", "powersgd"), ("zero2", "8bit"), ("zero3", "4bit"), ("hsdp", "8bit")],
)
@pytest.mark.sample(1)
def test_gradients_in_few_bits(
    strategy: str,
    compress: str,
    data: Path,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    together: Callable[..., None],
) -> None:
    out = tmp_path / "run"
    if strategy == "hsdp":  # two machines
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    options = [*TINY, *STEPS, "--parallel", strategy, "--compress", compress]
    together("train", "--data", data, "--out", out, *options)
    assert losses(out) != losses(alone)
    assert losses(out)[-1][0] == pytest.approx(losses(alone)[-1][0], rel=0.01)
    assert json.loads((out / "summary.json").read_text())["compress"] == compress


def test_another_number_of_processes_continues_the_run(
    data: Path, alone: Path, tmp_path: Path, together: Callable[..., None]
) -> None:
    again = tmp_path / "again"
    shutil.copytree(alone, again)
    shutil.rmtree(again / "checkpoints/step-00000006")
    shutil.rmtree(again / "model")
    together("train", "--data", data, "--out", again, *TINY, *STEPS, "--parallel", "zero2", "--resume")
    assert_close(again, alone)


@pytest.mark.parametrize("options", [["zero1"], ["zero3"], ["zero3", "--offload-weights", "nvme:."]])
@pytest.mark.sample(1)
def test_finetune_with_a_quantised_base(
    options: list[str], data: Path, alone: Path, tmp_path: Path, together: Callable[..., None]
) -> None:
    records = tmp_path / "data.jsonl"
    records.write_text(
        "".join(
            json.dumps({"prompt": f"the cat {i}", "completion": "sat on a mat"}) + "\n" for i in range(40)
        )
    )
    common = [
        "finetune",
        "--model",
        alone / "model",
        "--data",
        records,
        *TUNE,
        "--steps",
        "3",
        "--accumulate",
        "2",
    ]
    common += ["--device", "cpu"]
    succeed(*common, "--out", tmp_path / "one")
    together(*common, "--out", tmp_path / "two", "--parallel", *options)
    assert_close(tmp_path / "two", tmp_path / "one")
    assert weights(tmp_path / "two/adapter").keys() == weights(tmp_path / "one/adapter").keys()


def test_wrong_options_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["train", "--data", data, "--out", tmp_path / "run", *TINY]
    assert "--parallel: expected none | auto | ddp" in refuse(capsys, *common, "--parallel", "fsdp")
    pairs = [
        ("zero1", ["--offload", "cpu"]),
        ("ddp", ["--step-in-backward"]),
        ("zero2", ["--optimizer", "muon"]),
        ("zero1", ["--optimizer", "galore"]),
        ("zero2", ["--precision", "fp16"]),
        ("ddp", ["--baseline"]),
        ("zero3", ["--compile"]),
        ("none", ["--compress", "8bit"]),
        ("hsdp", ["--compress", "powersgd"]),
        ("zero2", ["--compress", "powersgd"]),
    ]
    for strategy, more in pairs:
        error = refuse(capsys, *common, "--parallel", strategy, *more)
        assert f"--parallel {strategy}: expected no {more[0]}" in error, error
    tune = ["finetune", "--model", tmp_path, "--data", data, "--out", tmp_path / "run", *TUNE]
    for more in (["--offload-weights", "nvme:."], ["--keep", "1GiB"]):
        error = refuse(capsys, *tune, "--parallel", "zero2", *more)
        assert f"--parallel zero2: expected no {more[0]}" in error, error
    monkeypatch.setenv("WORLD_SIZE", "2")
    for more in (["--device-memory", "none"], ["--parallel", "none"], ["--baseline"]):
        error = refuse(capsys, *common, *more)
        assert "--parallel: expected auto, ddp, zero1, zero2, zero3 or hsdp in a run of 2 processes" in error
    assert "--accumulate: expected a multiple of the 2 processes" in refuse(
        capsys, *common, "--parallel", "ddp", "--accumulate", "3"
    )
    assert "--compress 4bit: expected several machines with --parallel hsdp" in refuse(
        capsys, *common, "--parallel", "hsdp", "--accumulate", "2", "--compress", "4bit"
    )
    # without --accumulate, each process has a micro-batch in a step
    for more in ([], ["--parallel", "ddp"]):
        assert "the processes do not connect: " in refuse(capsys, *common, *more)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE: expected a number in the environment" in refuse(capsys, *common, "--parallel", "ddp")
    monkeypatch.delenv("WORLD_SIZE")
    assert not (tmp_path / "run").exists()
    for more in ([], ["--compress", "8bit"]):
        error = refuse(capsys, *common, "--parallel", "zero3", *more)
        assert "--parallel zero3: expected processes that torchrun has started, got one" in error, error
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun with one process
    succeed(*common, "--steps", "1", "--parallel", "zero3")
    assert "--parallel zero3: one process, which splits and sends nothing" in capsys.readouterr().out

"""Test `shoestring train` end to end: results, plain PyTorch as reference, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoestring
from cli_helpers import TINY, assert_same_weights, losses, refuse, run, succeed, text
from shoestring.training.run import loop


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text(text())
    return file


def command(data: Path, out: Path, *more: object) -> list[object]:
    steps = ["--steps", "12", "--eval-every", "4", "--checkpoint-every", "4", "--lr", "1e-2"]
    return ["train", "--data", data, "--out", out, *TINY, *steps, *more]


@pytest.fixture(scope="module")
def twins(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("twins")
    succeed(*command(data, folder / "ours"))
    succeed(*command(data, folder / "plain", "--baseline"))
    return folder / "ours", folder / "plain"


def test_twins_learn_the_same(twins: tuple[Path, Path]) -> None:
    ours, plain = losses(twins[0]), losses(twins[1])
    # The first losses agree closely, because both runs start from the same weights and the same batch.
    assert ours[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    assert ours[-1][0] < 0.9 * ours[0][0]
    for a, b in zip(ours, plain, strict=True):
        assert a[0] == pytest.approx(b[0], rel=0.01)
    assert ours[-1][2] == pytest.approx(plain[-1][2], rel=0.01)


def test_run_folder_is_complete(twins: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in twins:
        for name in (
            "run.json",
            "metrics.jsonl",
            "summary.json",
            "report.html",
            "report.png",
            "model/config.json",
        ):
            assert (folder / name).stat().st_size > 0
        assert not list(folder.rglob("*.partial"))
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["baseline"] == (folder.name == "plain") and summary["steps"] == 12
        assert sum(part["measured"] for part in summary["memory"]) == pytest.approx(
            summary["peak_memory"], rel=0.02
        )
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder / "model"),
            AutoTokenizer.from_pretrained(folder / "model"),
        )
        assert model.config.vocab_size == len(tokenizer) == 300
        assert tokenizer.decode(tokenizer("far away 漢\n")["input_ids"]) == "far away 漢\n"


def test_memory_follows_its_formula(twins: tuple[Path, Path]) -> None:
    measured = []
    for folder in twins:
        parts = {part["name"]: part for part in json.loads((folder / "summary.json").read_text())["memory"]}
        for part in ("weights", "gradients", "optimizer"):
            assert parts[part]["measured"] == pytest.approx(parts[part]["expected"], rel=0.001)
        assert parts["activations"]["measured"] == pytest.approx(parts["activations"]["expected"], rel=0.1)
        measured.append(parts["optimizer"]["measured"])
    # The optimizer state has 8 bits per value, and 32 bits in the run with --baseline.
    assert measured[0] < 0.3 * measured[1]


def test_accumulation_gives_the_same_gradient(data: Path, tmp_path: Path) -> None:
    for name, batch, times in (("one", 8, 1), ("four", 2, 4)):
        more = ["--batch-size", batch, "--accumulate", times, "--steps", 2, "--baseline", "--val-fraction", 0]
        succeed(*command(data, tmp_path / name, *more))
    for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "four"), strict=True):
        assert a[:2] == pytest.approx(b[:2], rel=1e-4) and a[2] is None


@pytest.mark.parametrize(
    "option",
    [
        "--activations=recompute",
        "--memory-budget=",
        "--precision=bf16",
        "--optimizer-state=fp32",
        "--schedule=wsd",
    ],
)
def test_options_reach_the_run(data: Path, twins: tuple[Path, Path], tmp_path: Path, option: str) -> None:
    budget = json.loads((twins[0] / "summary.json").read_text())["memory"][4]["measured"]
    option += str(budget) if option.endswith("=") else ""
    succeed(*command(data, tmp_path / "run", option))
    ours, reference = losses(tmp_path / "run"), losses(twins[0])
    assert ours[-1][0] == pytest.approx(reference[-1][0], rel=0.15)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    parts = {part["name"]: part["measured"] for part in summary["memory"]}
    before = {
        part["name"]: part["measured"]
        for part in json.loads((twins[0] / "summary.json").read_text())["memory"]
    }
    if option == "--activations=recompute":
        assert [row[0] for row in ours] == [row[0] for row in reference]
        assert parts["activations"] < 0.5 * before["activations"]
    # The memory budget is the size of the activations that the reference run saves. The peak of the reference
    # run is higher, so at least one layer must be recomputed.
    elif option.startswith("--memory-budget"):
        assert [row[0] for row in ours] == [row[0] for row in reference]
        assert parts["activations"] < before["activations"]
        activations = next(part for part in summary["memory"] if part["name"] == "activations")
        assert activations["measured"] == pytest.approx(activations["expected"], rel=0.05)
    elif option == "--optimizer-state=fp32":
        assert parts["optimizer"] > 2.5 * before["optimizer"]
    elif option == "--precision=bf16":
        assert ours[0][0] != reference[0][0]
    else:
        assert ours[-1][0] != reference[-1][0]


@pytest.mark.parametrize("where", ["cpu", "stream", "nvme"])
@pytest.mark.sample(2)
def test_offloaded_state_changes_nothing_else(
    data: Path, twins: tuple[Path, Path], tmp_path: Path, where: str
) -> None:
    place = f"nvme:{tmp_path}" if where == "nvme" else where
    succeed(*command(data, tmp_path / "run", "--offload", place))
    assert losses(tmp_path / "run") == losses(twins[0])
    before, after = (
        {part["name"]: part for part in json.loads((run / "summary.json").read_text())["memory"]}
        for run in (twins[0], tmp_path / "run")
    )
    if where == "nvme":
        assert after["optimizer"]["measured"] == 0 and "MB in a file" in after["optimizer"]["formula"]
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    else:
        # With --offload stream, the state is held in whole pages of 1024 blocks of 256 elements. Each element
        # has two codes of one byte, each block two fp32 scales, and there are two parameter groups.
        rounding = 2 * 1024 * (2 * 256 + 2 * 4) if where == "stream" else 0
        assert 0 <= after["optimizer"]["measured"] - before["optimizer"]["measured"] <= rounding
    if where == "cpu":
        assert after["offload"]["measured"] == pytest.approx(after["offload"]["expected"], rel=0.01)


class Killed(BaseException):
    """An exception that ends a run inside this process like a kill, because no code catches it."""


@pytest.mark.parametrize("plain", [[], ["--baseline"]], ids=["ours", "plain"])
def test_stopped_run_continues_bit_for_bit(
    data: Path, twins: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: list[str]
) -> None:
    straight, out = twins[bool(plain)], tmp_path / "run"
    # A checkpoint follows every fourth step. Step 3 is before the first checkpoint, steps 6 and 11 are
    # between later ones.
    for stop in (3, 6, 11):
        with monkeypatch.context() as patch:
            after_interval = loop.Trainer._after_interval

            def stopping(self: loop.Trainer, rows: list[dict], log: object, stop: int = stop) -> None:
                after_interval(self, rows, log)
                if rows and rows[-1]["step"] == stop:
                    raise Killed

            patch.setattr(loop.Trainer, "_after_interval", stopping)
            with pytest.raises(Killed):
                run(*command(data, out, "--resume", *plain))
    succeed(*command(data, out, "--resume", *plain))
    assert losses(out) == losses(straight)
    assert_same_weights(out / "model", straight / "model")


KILLER = """
import os, signal, sys
from shoestring.cli.app import main
from shoestring.training.report.metrics import MetricsLog

where, count, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def die(name):
    global count
    if where in name:
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

replace, add = os.replace, MetricsLog.add

def killing_replace(source, target):
    die(f"before {target}")
    replace(source, target)
    die(f"after {target}")

def killing_add(self, row):
    add(self, row)
    die("metrics")

os.replace, MetricsLog.add = killing_replace, killing_add
sys.exit(main(arguments))
"""


# tests/crash kills training runs at random times.
@pytest.mark.nightly
def test_killed_run_continues_bit_for_bit(data: Path, twins: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [str(argument) for argument in command(data, out, "--resume")]
    # The run kills its own process before a checkpoint is renamed, just after a checkpoint is renamed, and
    # when it logs a step.
    for where, count in (
        ("before " + str(out / "checkpoints"), 1),
        ("after " + str(out / "checkpoints"), 2),
        ("metrics", 3),
    ):
        process = subprocess.run(
            [sys.executable, "-c", KILLER, where, str(count), *arguments], capture_output=True, text=True
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
    assert list((out / "checkpoints").iterdir())
    succeed(*arguments)
    assert losses(out) == losses(twins[0])
    assert_same_weights(out / "model", twins[0] / "model")
    assert not list(out.rglob("*.partial"))


def test_finished_run_can_be_resumed(data: Path, tmp_path: Path) -> None:
    more = ["--steps", 2, "--baseline", "--resume"]
    succeed(*command(data, tmp_path / "run", *more))
    before = losses(tmp_path / "run")
    succeed(*command(data, tmp_path / "run", *more))
    assert losses(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (["--lr", "0.5"], "lr"),
        (["--preset", "mini"], "preset"),
        (["--seed", "7"], "seed"),
        (["--baseline"], "baseline"),
    ],
)
def test_resume_with_another_setting_names_it(
    data: Path, twins: tuple[Path, Path], capsys: pytest.CaptureFixture[str], change: list[str], field: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in twins[0].rglob("*")}
    assert f" {field} differs: the run has " in refuse(capsys, *command(data, twins[0], "--resume", *change))
    assert before == {path: path.stat().st_mtime_ns for path in twins[0].rglob("*")}


def test_resume_with_other_data_names_it(
    twins: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(text(50))
    assert "data differs" in refuse(capsys, *command(tmp_path / "text.txt", twins[0], "--resume"))


def test_resume_with_edited_files_names_them(
    data: Path, twins: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run compares contents: of its data, and of the tokenizer and tokens that it has prepared."""
    edited = tmp_path / data.name
    edited.write_text(data.read_text().replace("cat", "dog"))  # the same name and size
    line = refuse(capsys, *command(edited, twins[0], "--resume"))
    assert "data differs: 'text.txt' has other contents than the run has read" in line
    for name in ("tokens.bin", "tokenizer/tokenizer.json"):
        path = twins[0] / name
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if name == "tokens.bin" else before + b" ")
        try:
            line = refuse(capsys, *command(data, twins[0], "--resume"))
            assert f"{name} has changed since the run began" in line
        finally:
            path.write_bytes(before)
    summary = (twins[0] / "summary.json").stat().st_mtime_ns
    succeed(*command(data, twins[0], "--resume"))
    assert (twins[0] / "summary.json").stat().st_mtime_ns > summary


def test_loss_that_is_not_finite_stops_the_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    more = ["--lr", "1e30", "--warmup", "0", "--clip", "0", "--baseline", "--checkpoint-every", "1"]
    line = refuse(capsys, *command(data, out, *more))
    assert "step 2: the " in line and "--lr" in line
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000001"] and not (
        out / "model"
    ).exists()


def test_interrupt_leaves_nothing_half_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = loop.save_checkpoint

    def interrupted(*arguments: object, **options: object) -> object:
        if arguments[1] == 8:
            monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        return saved(*arguments, **options)

    monkeypatch.setattr(loop, "save_checkpoint", interrupted)
    assert run(*command(data, tmp_path / "run", "--baseline")) == 130
    assert capsys.readouterr().err == "shoestring: checkpoint at step 4, continue with --resume\n"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_threads_are_recorded_and_taken_again(data: Path, tmp_path: Path) -> None:
    more = ["--steps", 1, "--baseline", "--resume"]
    succeed(*command(data, tmp_path / "run", *more))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["threads"] == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = [
            argument
            for argument in command(data, tmp_path / "run", *more)
            if argument not in ("--threads", "1")
        ]
        succeed(*arguments)
        assert json.loads((tmp_path / "run" / "run.json").read_text())["threads"] == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], sys.platform == "linux"),
        (["--no-host-allocator"], False),
        (["--baseline"], False),
        (["--baseline", "--host-allocator"], True),
    ],
)
def test_host_allocator(
    options: list[str], expected: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option decides the allocator during the run only. It is recorded, and may change on resume."""
    allocator = shoestring.host_allocator(enable=False)
    used = []
    fit = loop.Trainer.fit
    monkeypatch.setattr(
        loop.Trainer, "fit", lambda self, start: (used.append(allocator.enabled), fit(self, start))
    )
    succeed(*command(data, tmp_path / "run", "--steps", 1, *options))
    assert used == [expected] and not allocator.enabled
    assert json.loads((tmp_path / "run" / "run.json").read_text())["host_allocator"] is expected
    other = "--no-host-allocator" if expected else "--host-allocator"
    succeed(*command(data, tmp_path / "run", "--steps", 1, *options, other, "--resume"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["host_allocator"] is not expected


def test_the_host_allocator_changes_no_result(twins: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    succeed(*command(data, tmp_path / "run", "--no-host-allocator"))
    assert losses(tmp_path / "run") == losses(twins[0])
    assert_same_weights(tmp_path / "run" / "model", twins[0] / "model")

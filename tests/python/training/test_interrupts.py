"""Test that Ctrl-C and SIGTERM finish and save the current step.

A resumed run gives the same results as an uninterrupted one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_helpers import TINY, TUNE, assert_same_weights, losses, refuse, succeed, text
from cli_server import Commands, wait_for
from shoestring.training.run import signals
from shoestring.training.run.checkpoint import checkpoints, step_of

pytestmark = pytest.mark.usefixtures("blank_images")

# Python code that replaces a method. The new method creates a file, and waits until the test has sent a
# signal and removed this file.
PAUSE = """
import os, time
from shoestring.{module} import {name} as place
def paused(*arguments, _before=place.{method}, **options):
    {result}
    open({mark!r}, "w").close()
    while os.path.exists({mark!r}):
        time.sleep(0.01)
    return {value}
place.{method} = paused
"""
LONG_STEP = """
import hashlib
from shoestring.training.run import loop
def long(self, *_, **__):
    open({mark!r}, "w").close()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # one call into C, of minutes
loop.Trainer._accumulate = long
"""


def pause_before(module: str, name: str, method: str, mark: Path) -> str:
    return PAUSE.format(
        module=module,
        name=name,
        method=method,
        mark=str(mark),
        result="",
        value="_before(*arguments, **options)",
    )


def pause_after(module: str, name: str, method: str, mark: Path) -> str:
    return PAUSE.format(
        module=module, name=name, method=method, mark=str(mark), result="result = _before(*arguments, **options)",
        value="result",
    )  # fmt: skip


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(text())
    succeed(
        "train", "--data", folder / "text.txt", "--out", folder / "base", *TINY, "--steps", "1", "--baseline"
    )
    return folder


def command(kind: str, data: Path, out: Path, *more: object) -> list[object]:
    steps = [
        "--steps",
        "8",
        "--eval-every",
        "3",
        "--checkpoint-every",
        "1000",
        "--data",
        data / "text.txt",
        "--out",
        out,
    ]
    if kind == "train":
        return ["train", *TINY, *steps, *more]
    return ["finetune", "--model", data / "base" / "model", *TUNE, "--val-fraction", "0.2", *steps, *more]


@pytest.mark.parametrize("kind", ["train", "finetune"])
def test_a_signal_ends_with_a_checkpoint(commands: Commands, data: Path, tmp_path: Path, kind: str) -> None:
    log, out, mark = tmp_path / "log", tmp_path / "run", tmp_path / "mark"
    assert commands.run(*command(kind, data, tmp_path / "whole"), log=log) == 0, log.read_text()
    # Signals arrive in step 1, in step 2, after the evaluation of step 3, and after step 4 is logged.
    moments = [
        (signal.SIGINT, pause_before("training.run.loop", "Trainer", "_accumulate", mark), 1),
        (signal.SIGTERM, pause_after("training.run.loop", "Trainer", "_accumulate", mark), 2),
        (signal.SIGINT, pause_after("training.run.loop", "Trainer", "evaluate", mark), 3),
        (signal.SIGTERM, pause_after("training.report.metrics", "MetricsLog", "add", mark), 4),
    ]
    for number, code, step in moments:
        process = commands.start(*command(kind, data, out, "--resume"), log=log, code=code)
        wait_for(mark.exists)
        os.kill(process, number)
        wait_for(lambda: "a second signal exits at once" in log.read_text())
        mark.unlink()
        assert commands.wait(process) == 128 + number, log.read_text()
        name = signal.Signals(number).name
        lines = log.read_text().splitlines()
        assert (
            f"shoestring: {name}: finishes the step and saves a checkpoint; a second signal exits at once"
            in lines
        )
        assert lines[-1] == f"shoestring: checkpoint at step {step}, continue with --resume"
        assert step_of(checkpoints(out)[-1]) == step == len(losses(out))
    assert commands.run(*command(kind, data, out, "--resume"), log=log) == 0
    assert losses(out) == losses(tmp_path / "whole")
    result = "model" if kind == "train" else "adapter"
    assert_same_weights(out / result, tmp_path / "whole" / result)


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_long_step_at_once(
    commands: Commands, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log, out, mark = tmp_path / "log", tmp_path / "run", tmp_path / "mark"
    process = commands.start(
        *command("train", data, out),
        log=log,
        code=pause_before("training.run.loop", "Trainer", "_accumulate", mark),
    )
    wait_for(mark.exists)
    os.kill(process, number)
    mark.unlink()
    assert commands.wait(process) == 128 + number

    process = commands.start(
        *command("train", data, out, "--resume"), log=log, code=LONG_STEP.format(mark=str(mark))
    )
    wait_for(mark.exists)
    os.kill(process, number)
    wait_for(lambda: "a second signal exits at once" in log.read_text())
    began = time.monotonic()
    os.kill(process, number)
    assert commands.wait(process) == 128 + number
    assert time.monotonic() - began < 5
    assert log.read_text().splitlines()[-1] == f"shoestring: second signal ({number.name}): exit at once"
    assert [step_of(checkpoint) for checkpoint in checkpoints(out)] == [1]
    assert commands.run(*command("train", data, out, "--resume"), log=log) == 0, log.read_text()


DEFERS = """
import _thread, os, signal, time
from shoestring.training.run import loop
accumulate = loop.Trainer._accumulate
def deferring(self, *arguments, **options):
    handlers, pending = {{}}, []
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda number, _: pending.append(number))
    open({mark!r}, "w").close()
    while not pending:
        time.sleep(0.001)
    time.sleep(0.05)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for number in pending:
        _thread.interrupt_main(number)
    return accumulate(self, *arguments, **options)
loop.Trainer._accumulate = deferring
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_other_code_defers_counts_once(
    commands: Commands, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log, mark = tmp_path / "log", tmp_path / "mark"
    process = commands.start(
        *command("train", data, tmp_path / "run"), log=log, code=DEFERS.format(mark=str(mark))
    )
    wait_for(mark.exists)
    os.kill(process, number)
    assert commands.wait(process) == 128 + number
    assert log.read_text().splitlines()[-1] == "shoestring: checkpoint at step 1, continue with --resume"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_leaves_nothing(
    commands: Commands, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log, mark = tmp_path / "log", tmp_path / "mark"
    code = pause_before("training.run", "folder", "write_token_file", mark)
    process = commands.start(*command("train", data, tmp_path / "deep" / "run"), log=log, code=code)
    wait_for(mark.exists)
    os.kill(process, number)
    assert commands.wait(process) == 128 + number
    assert (
        log.read_text().splitlines()[-1]
        == "shoestring: interrupted before the first step; nothing was written"
    )
    assert not (tmp_path / "deep").exists()


def test_a_signal_while_the_model_is_saved(commands: Commands, data: Path, tmp_path: Path) -> None:
    log, out, mark = tmp_path / "log", tmp_path / "run", tmp_path / "mark"
    code = pause_after("training.run.loop", "Trainer", "fit", mark)
    process = commands.start(*command("train", data, out), log=log, code=code)
    wait_for(mark.exists)
    os.kill(process, signal.SIGTERM)
    assert commands.wait(process) == 143
    assert log.read_text().splitlines()[-1] == "shoestring: checkpoint at step 8, continue with --resume"
    assert not (out / "model").exists() and not list(out.rglob("*.partial"))
    assert commands.run(*command("train", data, out, "--resume"), log=log) == 0
    assert (out / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tokenization_leaves_nothing(
    commands: Commands, data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "out").mkdir()
    log, mark = tmp_path / "log", tmp_path / "mark"
    code = pause_before("data.encoding", "Encoder", "ids", mark)
    arguments = [
        "tokenize",
        "--data",
        data / "text.txt",
        "--vocab-size",
        "300",
        "--out",
        tmp_path / "out" / "tokens.bin",
    ]
    process = commands.start(*arguments, log=log, code=code)
    wait_for(mark.exists)
    os.kill(process, number)
    assert commands.wait(process) == 128 + number
    assert log.read_text() == "shoestring: interrupted\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_tokenization_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoestring.data.encoding import Encoder

    def fails(*_: object) -> None:
        raise MemoryError

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Encoder, "ids", fails)
    out = tmp_path / "out" / "tokens.bin"
    line = refuse(capsys, "tokenize", "--data", data / "text.txt", "--vocab-size", 300, "--out", out)
    assert "out of memory; take a smaller" in line
    assert list((tmp_path / "out").iterdir()) == []


def test_a_long_step_is_said_at_start(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "LONG_WAIT", 0.0)
    succeed(*command("train", data, tmp_path / "run", "--steps", 4))
    told = [line for line in capsys.readouterr().out.splitlines() if "a second one exits at once" in line]
    assert (
        len(told) == 2 and told[0].startswith("a step takes ") and told[1].startswith("an evaluation takes ")
    )


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.handled():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and signals.received() is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in signals.HANDLED]
    for number in signals.HANDLED:
        with pytest.raises(signals.Interrupted), signals.handled():
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert [signal.getsignal(number) for number in signals.HANDLED] == before
    assert signal.set_wakeup_fd(-1) == -1

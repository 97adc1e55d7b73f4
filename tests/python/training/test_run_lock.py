"""Test that a second process with the same output folder is refused before it writes or deletes anything."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli_helpers import TINY, assert_same_weights, losses, refuse, text
from cli_server import Commands, wait_for
from shoestring.core.errors import InputError
from shoestring.files.lock import LOCK, locked

pytestmark = pytest.mark.usefixtures("blank_images")

STEPS = ["--steps", "6", "--checkpoint-every", "2", "--baseline"]
# Python code that patches Trainer.fit to create the file "held", and to wait until the test removes that
# file.
HOLD = """
import pathlib, time
from shoestring.training.run import loop
fit = loop.Trainer.fit
def held(self, start=0):
    (self.run.folder / "held").touch()
    while (self.run.folder / "held").exists():
        time.sleep(0.01)
    fit(self, start)
loop.Trainer.fit = held
"""


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(text())
    return tmp_path / "text.txt"


def train(data: Path, out: Path, *more: object) -> list[object]:
    return ["train", "--data", data, "--out", out, *TINY, *STEPS, *more]


def test_the_second_run_is_refused_and_changes_nothing(
    commands: Commands, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    process = commands.start(*train(data, out), log=tmp_path / "log", code=HOLD)
    wait_for((out / "held").exists)
    (out / "checkpoints").mkdir()
    for unfinished in ("checkpoints/step-00000001.partial", "summary.json.7.partial"):
        (out / unfinished).write_text("half")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for more in ([], ["--resume"]):
        assert refuse(capsys, *train(data, out, *more)).endswith(
            f": --out {out}: in use by process {process}"
        )
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for path in (out / "checkpoints/step-00000001.partial", out / "held"):
        path.unlink()
    assert commands.wait(process) == 0
    assert not (out / LOCK).exists()


def test_a_killed_run_does_not_hold_its_folder(commands: Commands, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = commands.start(*train(data, out), log=tmp_path / "log", code=HOLD)
    wait_for((out / "held").exists)
    os.kill(process, signal.SIGKILL)
    assert commands.wait(process) == -signal.SIGKILL and (out / LOCK).exists()
    assert commands.run(*train(data, out, "--resume"), log=tmp_path / "log") == 0, (
        tmp_path / "log"
    ).read_text()
    assert not (out / LOCK).exists()


def test_of_two_runs_one_goes_on(commands: Commands, data: Path, tmp_path: Path, seed: int) -> None:
    assert commands.run(*train(data, tmp_path / "alone"), log=tmp_path / "log") == 0
    rng = random.Random(seed)
    for number in range(4):
        out, logs = tmp_path / f"run{number}", [tmp_path / f"log{number}-{i}" for i in range(2)]
        more = ["--resume"] if number % 2 else []
        first = commands.start(*train(data, out, *more), log=logs[0])
        time.sleep(rng.uniform(0, 0.05) if number < 2 else 0)
        processes = [first, commands.start(*train(data, out, *more), log=logs[1])]
        codes = [commands.wait(process) for process in processes]
        assert sorted(codes) == [0, 2], [log.read_text() for log in logs]
        line = logs[codes.index(2)].read_text()
        assert line == f"shoestring: error: --out {out}: in use by process {processes[codes.index(0)]}\n"
        assert losses(out) == losses(tmp_path / "alone")
        assert_same_weights(out / "model", tmp_path / "alone" / "model")


def test_of_two_tokenizations_one_goes_on(commands: Commands, data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    out, logs = tmp_path / "out" / "tokens.bin", [tmp_path / "log0", tmp_path / "log1"]
    arguments = ["tokenize", "--data", data, "--vocab-size", "300", "--out", out]
    processes = [commands.start(*arguments, log=log) for log in logs]
    codes = [commands.wait(process) for process in processes]
    assert sorted(codes) == [0, 2], [log.read_text() for log in logs]
    line = logs[codes.index(2)].read_text()
    # The message to the second process depends on whether the first process is still running or has finished.
    assert "in use by process" in line or "exists; give another name" in line
    assert sorted(path.name for path in out.parent.iterdir()) == ["tokens-tokenizer", "tokens.bin"]


def test_demo_is_refused_in_a_demo_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.json").write_text("{}")
    (tmp_path / "data").mkdir()
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path,))
    holder.start()
    wait_for((tmp_path / "held").exists)
    assert f"--out {tmp_path}: in use by process {holder.pid}" in refuse(capsys, "demo", "--out", tmp_path)
    assert (tmp_path / "data").is_dir()
    (tmp_path / "held").unlink()
    holder.join()


def _hold(folder: Path) -> None:
    with locked(folder / LOCK, "--out"):
        (folder / "held").touch()
        wait_for(lambda: not (folder / "held").exists())


def test_a_lock_that_is_removed_is_never_held_twice(tmp_path: Path) -> None:
    """Two processes never hold the same lock at once, although each release deletes the lock file."""
    fork = multiprocessing.get_context("fork")
    inside, overlaps, taken = (fork.Value("i", 0) for _ in range(3))

    def compete() -> None:
        mine, end = 0, time.monotonic() + 60
        while mine < 8 and time.monotonic() < end:
            try:
                with locked(tmp_path / "folder" / LOCK, "--out folder"):
                    mine += 1
                    with inside.get_lock():
                        overlaps.value += inside.value
                        inside.value += 1
                        taken.value += 1
                    time.sleep(0)
                    with inside.get_lock():
                        inside.value -= 1
            except InputError as error:
                assert "in use by" in str(error), error
            with contextlib.suppress(OSError):
                (tmp_path / "folder").rmdir()

    processes = [fork.Process(target=compete) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert taken.value == 32 and overlaps.value == 0


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        (b"", "another process"),
        (b"\xff\x00 1", "another process"),
        (b"12 elsewhere", "process 12 on elsewhere"),
    ],
)
def test_the_holder_is_named_as_far_as_it_is_known(tmp_path: Path, content: bytes, holder: str) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with _other_process_holds(tmp_path / LOCK) as message:
        assert message(lambda: locked(tmp_path / LOCK, "--out a")) == f"--out a: in use by {holder}"


class _other_process_holds:
    """Context manager: a process locks a file without writing its process id into the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Callable[[Callable[[], object]], str]:
        context = multiprocessing.get_context("fork")
        ours, self.theirs = context.Pipe()
        self.process = context.Process(target=self._hold, args=(ours,))
        self.process.start()
        self.theirs.recv()
        return self._message

    def _hold(self, connection: object) -> None:
        with open(self.path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            connection.send(None)
            connection.recv()

    def _message(self, make: Callable[[], object]) -> str:
        with pytest.raises(InputError) as caught, make():
            pass
        return str(caught.value)

    def __exit__(self, *error: object) -> None:
        self.theirs.send(None)
        self.process.join()


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with locked(tmp_path / LOCK, "--out"):
        pass
    assert list(tmp_path.iterdir()) == []

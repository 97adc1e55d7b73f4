"""Test diloco_peers.py: processes are killed and others join while the training goes on."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes  # noqa: F401  # imports what the processes need, once
from ports import free_port

FOLDER = Path(__file__).parents[3] / "examples/python"


def _run(file: Path, arguments: list[str]) -> None:
    """Run the example in this process, which prints to a file."""
    with file.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    importlib.import_module("diloco_peers").main(arguments)


def _wait(condition: Callable[[], object], files: list[Path]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, [file.read_text() for file in files if file.exists()]
        time.sleep(0.05)


def test_processes_come_and_go(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    port = free_port()
    files = [tmp_path / f"{number}.txt" for number in range(5)]

    def start(number: int, *arguments: str) -> Any:
        process = context.Process(target=_run, args=(files[number], list(arguments)))
        process.start()
        return process

    def join(number: int, steps: int) -> Any:
        return start(number, "--join", f"localhost:{port}", "--at-least", "2", "--steps", str(steps))

    def text(number: int) -> str:
        return files[number].read_text() if files[number].exists() else ""

    def losses(number: int, after: str) -> list[float]:
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text(number).rpartition(after)[2])]

    def trains(numbers: tuple[int, ...], after: str) -> Callable[[], bool]:
        """Return a condition: processes have averaged twice after they have printed a text."""
        return lambda: all(after in text(number) and len(losses(number, after)) > 1 for number in numbers)

    started = [start(0, "--serve", str(port))]
    try:
        _wait(lambda: "serves" in text(0), files)
        started += [join(number, 100_000) for number in (1, 2, 3)]
        _wait(trains((1, 2, 3), "of 3 processes"), files)
        started[3].kill()
        _wait(trains((1, 2), "of 2 processes"), files)
        for number in (1, 2):
            assert re.search(r"rank \d of 3: .*; rank \d has ended or is stopped\n", text(number))
        started.append(join(4, 100_000))
        _wait(trains((1, 2, 4), "of 3 processes"), files)
        joined = re.search(r"joins at step (\d+)", text(4))
        assert joined is not None and int(joined[1]) > 0
        assert losses(4, "of 3 processes")[-1] < losses(1, "joins")[0]
    finally:
        for process in started:
            process.kill()
            process.join()


def test_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    main = importlib.import_module("diloco_peers").main
    for arguments in ([], ["--join", "localhost:1", "--serve", "1"], ["--join", "a:1", "--steps", "0"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        printed = capsys.readouterr()
        assert error.value.code == 2 and printed.err.count("\n") == 1

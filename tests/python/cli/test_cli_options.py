"""Commands refuse hostile values of every option in one line with exit code 2, before any work begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

from cli_helpers import refuse, run, succeed, text
from shoestring.cli import app as module
from shoestring.optim import state_layout
from shoestring.training import config, optimizers
from shoestring.training import options as declared

COMMANDS: dict[str, Any] = typer.main.get_command(module.app).commands  # type: ignore[attr-defined]
HINTS = {
    each.callback.__name__: get_type_hints(each.callback)
    for each in module.app.registered_commands
    if each.callback
}
# Every option for numbers rejects the values in UNSOUND. Options for integers reject all values in NUMBERS.
UNSOUND = ["-1", "nan", "inf", "9" * 5000, "x"]
NUMBERS = [*UNSOUND, "1e9", str(10**10)]
STRINGS = ["", "-1", "a" * 5000, "\udcff", "/dev/null/sub", "nvme:/dev/null", "9" * 400 + "GiB"]
SECONDS = 30  # time limit for refusing one value, long enough for a busy machine


def options(numbers: bool) -> list[Any]:
    """Return all options and arguments of the commands that take numbers (if `numbers`) or text (if not)."""
    found = []
    for name, hints in HINTS.items():
        for option in COMMANDS[name].params:
            kinds = {hints[option.name], *get_args(hints[option.name])} if option.name in hints else {bool}
            if bool not in kinds and bool(kinds & {int, float}) == numbers:
                found.append(pytest.param(name, option, id=f"{name}-{option.name}"))
    return found


def required(command: str, option: Any, values: dict[str, str], value: str) -> list[str]:
    """Return a command line with all that ``command`` requires, and with `value` for ``option``."""
    arguments, positional = [command], []
    for each in COMMANDS[command].params:
        given = value if each.name == option.name else values.get(each.name)
        if given is None or (not each.required and each.name != option.name and each.name not in values):
            continue
        if each.param_type_name == "argument":
            positional.append(given)
        else:
            arguments.append(f"{each.opts[0]}={given}")
    return [*arguments, "--", *positional]


class Began(Exception):
    """Raised when a command has accepted its options and begins to work."""


@pytest.mark.parametrize(("command", "option"), options(numbers=True))
@pytest.mark.sample(16)
def test_numbers_out_of_range(
    command: str, option: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: object) -> None:
        raise Began

    monkeypatch.setattr(module, "load_operators", begin)
    values = {each.name: "x" for each in COMMANDS[command].params if each.required}
    integer = int in {*get_args(HINTS[command][option.name]), HINTS[command][option.name]}
    for value in NUMBERS if integer else UNSOUND:
        line = refuse(capsys, *required(command, option, values, value))
        assert option.opts[0] in line and len(line) < 200, value


def test_every_command_is_here() -> None:
    assert len(options(numbers=True)) >= 45 and {case.values[0] for case in options(numbers=False)} == set(
        COMMANDS
    )


def test_the_choices_are_those_of_the_library() -> None:
    assert set(declared.OPTIMIZERS) == set(optimizers.OPTIMIZERS)
    assert set(config.ROUNDING.values()) == set(state_layout.ROUNDINGS)
    assert declared.STATES == state_layout.STATES


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create tiny valid values for the options that the commands require, such as data and a model."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text(text(60))
    tiny = ["--preset", "tiny", "--vocab-size", "300", "--steps", "1", "--baseline", "--threads", "1"]
    succeed(
        "train", "--data", folder / "data", "--out", folder / "run", *tiny, "--seq-len", 16, "--batch-size", 1
    )
    return {
        "data": str(folder / "data"), "model": str(folder / "run" / "model"), "prompt": "the", "runs": str(folder / "run"),
        "preset": "tiny", "vocab_size": "300", "seq_len": "16", "batch_size": "1", "steps": "1", "threads": "1",
        "max_new_tokens": "1", "rank": "2",
    }  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "option"), options(numbers=False))
@pytest.mark.sample(14)
def test_strange_text(
    command: str, option: Any, given: dict[str, str], place: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For a strange text as a value, a command either succeeds, or prints one line and exits with code 2.

    A command that accepts the value runs for real, with tiny data and one step.
    """
    if command == "demo":
        monkeypatch.setattr("shoestring.cli.demo.standard_library", lambda path: 1 / 0)
    for number, value in enumerate(STRINGS):
        own = given | {"out": str(place / f"out{number}")}
        if command == "tokenize" and option.name == "tokenizer":
            own = {key: v for key, v in own.items() if key != "vocab_size"}
        if command == "compare":
            own["out"] = str(place)
        began = time.monotonic()
        capsys.readouterr()
        try:
            code = run(*required(command, option, own, value))
        except ZeroDivisionError:
            code = 0
        errors = capsys.readouterr().err.splitlines()
        assert code in (0, 2) and len(errors) == (1 if code else 0), (value, errors)
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "option", ["vocab_size", "workspace_mb", "rank", "threads", "clip", "weight_decay", "eval_batches"]
)
@pytest.mark.sample(3)
def test_the_largest_values_work(
    option: str, given: dict[str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands work with a very large value of an option, such as the largest allowed vocabulary size."""
    most = {
        "vocab_size": 1 << 20,
        "workspace_mb": 1 << 20,
        "rank": 64,
        "threads": 256,
        "clip": 1e30,
        "weight_decay": 0.5,
    }
    command = "finetune" if option == "rank" else "train"
    names = {each.name for each in COMMANDS[command].params}
    own = {key: value for key, value in given.items() if key in names} | {"out": str(place / "run")}
    own |= {option: str(most.get(option, 10**9))}
    succeed(
        *required(command, next(p for p in COMMANDS[command].params if p.name == option), own, own[option])
    )

"""Test small_llama.py and the C++ program of the same name, which continue each other's runs bit for bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from cpp_examples import ENVIRONMENT, REPOSITORY, build_example, learnable_tokens, token_file

VOCAB, SEQ_LEN, STEPS = 128, 16, 12
SHAPE: list[str] = (
    f"--steps {STEPS} --warmup 3 --batch-size 8 --seq-len {SEQ_LEN} --layers 2 --width 32 --heads 4 "
    "--save-every 6 --eval-every 4 --threads 1"
).split()


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples/python"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return token_file(tmp_path / "data.tokens", learnable_tokens(4000, VOCAB), vocab=VOCAB)


def train(*arguments: object) -> list[dict[str, float]]:
    from small_llama import main

    return main([*SHAPE, *map(str, arguments)])


def cpp(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = build_example("small_llama")
    return subprocess.run(
        [program, *SHAPE, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


def numbers(output: str) -> list[dict[str, float]]:
    """Return the rows that the C++ program has printed, without the seconds."""
    rows = [line.split() for line in output.splitlines() if line.startswith("step ")]
    found = [dict(zip(row[::2], map(float, row[1::2]), strict=True)) for row in rows]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def of_both(path: Path) -> dict[str, Any]:
    """Return the tensors of a run that both languages write, as bytes."""
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in load_file(path).items()
        if name not in ("random.python", "random.numpy")
    }


@pytest.mark.parametrize("recipe", ["shoestring", "adamw"])
def test_it_learns(recipe: str, data: Path) -> None:
    rows = train("--data", data, "--recipe", recipe, "--steps", 40, "--eval-every", 20, "--lr", "1e-2")
    assert [row["step"] for row in rows] == [20, 40]
    # Half of the tokens follow from the token before, and the others are uniform over 32.
    assert rows[-1]["validation"] < rows[0]["validation"] < np.log(VOCAB)
    assert ("average" in rows[0]) == (recipe == "shoestring")


def test_it_draws_what_it_has_written(data: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    written = {
        recipe: train("--data", data, "--recipe", recipe, "--json", report)
        for recipe in ("shoestring", "adamw")
    }
    assert json.loads(report.read_text()) == written
    train("--plot", report)
    drawn = report.with_suffix(".svg").read_text()
    assert all(f">{label}<" in drawn for label in ("shoestring", "shoestring, average", "adamw"))


def test_the_programs_compute_the_same(data: Path, tmp_path: Path) -> None:
    """Runs are equal in both languages, from the initial weights to the state in the file, and continue there."""
    whole = train("--data", data, "--run", tmp_path / "python")
    printed = cpp("--data", data, "--run", tmp_path / "cpp")
    assert printed.returncode == 0, printed.stderr
    expected = [
        {key: float(f"{value:.6g}") for key, value in row.items() if key != "seconds"} for row in whole
    ]
    assert numbers(printed.stdout) == expected
    python = of_both(tmp_path / "python")
    assert of_both(tmp_path / "cpp") == python
    assert {"part.callbacks.averages.updates", "part.guard.statistics", "random.cpu"} < python.keys()


@pytest.mark.parametrize("first", ["python", "cpp"])
def test_one_program_continues_the_run_of_the_other(first: str, data: Path, tmp_path: Path) -> None:
    train("--data", data, "--run", tmp_path / "whole")
    arguments = ["--data", data, "--run", tmp_path / "run"]
    for language, rest in [(first, ["--until", 5]), ("cpp" if first == "python" else "python", ["--resume"])]:
        if language == "python":
            train(*arguments, *rest)
        else:
            done = cpp(*arguments, *rest)
            assert done.returncode == 0, done.stderr
    assert of_both(tmp_path / "run") == of_both(tmp_path / "whole")


def test_bad_steps_are_skipped(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import small_llama

    forward = small_llama.Llama.forward
    calls = iter(range(10**6))
    monkeypatch.setattr(
        small_llama.Llama,
        "forward",
        lambda self, rows: forward(self, rows) * (float("nan") if next(calls) == 2 else 1),
    )
    rows = train("--data", data)
    assert all(np.isfinite(row["validation"]) for row in rows)
    assert "1 bad steps were skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "--width 30 --heads 4: expected even heads, and a width that 2 x heads divides"),
        (["--plot", "none.json"], "--plot none.json: expected a file that --json has written, got none"),
        (["--resume"], "--resume: expected --run FILE of an earlier run, got none"),
        (["--seq-len", "2000"], "expected more than 64 blocks of --seq-len 2000, got fewer"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train("--data", data, *arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and message in errors and errors.count("\n") == 1
    if "--plot" in arguments:  # an option of the Python program alone
        return
    done = cpp("--data", data, *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_run_of_other_data_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train("--data", data, "--run", run)
    other = token_file(tmp_path / "other.tokens", learnable_tokens(3000, VOCAB), vocab=VOCAB)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train("--data", other, "--run", run, "--resume")
    message = "received 4000 tokens, vocabulary 128: the file belongs to another run"
    assert message in capsys.readouterr().err
    done = cpp("--data", other, "--run", run, "--resume")
    assert done.returncode == 2 and message in done.stderr, done.stderr

"""Helpers for tests of the command line: run a command in this process, create text, read a run's results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoestring.cli.app import main

WORDS = "the cat sat on a mat while two dogs ran over hills and far away to see rivers".split()
# Options for the smallest model and the fewest steps that still learn. One thread, because other tests may
# run at the same time. Products in fp32, so that results do not depend on which precision is fast on the machine.
SHORT = ["--seq-len", "32", "--batch-size", "4", "--warmup", "2", "--precision", "fp32", "--threads", "1"]
TINY = ["--preset", "tiny", "--vocab-size", "300", *SHORT]
TUNE = [*SHORT, "--rank", "4"]


def text(lines: int = 200) -> str:
    """Return lines of text in which each word follows from the one before, so that a model learns them."""
    return (
        "\n".join(
            " ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(12)) for i in range(lines)
        )
        + "\n"
    )


def run(*arguments: object) -> int:
    """Run a shoestring command in this process, and restore PyTorch's number of threads afterwards."""
    threads = torch.get_num_threads()
    try:
        return main([str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)


def succeed(*arguments: object) -> None:
    assert run(*arguments) == 0


def refuse(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a shoestring command that must end with code 2 and one line on stderr; return this line."""
    capsys.readouterr()
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("shoestring: error: "), errors
    return lines[0]


def losses(folder: Path) -> list[tuple[float, float, float | None]]:
    """Return (loss, gradient norm, validation loss) for each logged step of a training run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("val_loss")) for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

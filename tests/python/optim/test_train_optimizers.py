"""Tests of benchmarks/optim/train_optimizers.py on a short text.

The tests compare fp32 master weights with bf16 weights plus remainders, resume an interrupted run, and check
the printed table.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3]))
from benchmarks.optim import train_optimizers
from shoestring.training import loop

STEPS = 10
MASTER, SPLIT = "8bit, fp32 master of bf16 weights", "8bit, bf16 weights, remainder"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an output folder. During the test, the benchmark trains on a short text."""

    def text(path: Path) -> int:
        functions = (f"def function_{i}(x):\n    return x * {i} + {i * i}\n" for i in range(3000))
        return path.write_text("".join(json.dumps({"text": t}) + "\n" for t in functions))

    monkeypatch.setattr(train_optimizers, "standard_library", text)
    threads = torch.get_num_threads()
    yield tmp_path / "runs"
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *variants: str) -> dict:
    arguments = ["--out", str(out), "--steps", str(STEPS), "--seeds", "3", "--variants", *variants]
    monkeypatch.setattr(sys, "argv", ["train_optimizers.py", *arguments])
    train_optimizers.main()
    return json.loads((out / "results.json").read_text())


def test_runs_and_their_table(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_interval = loop.Trainer._after_interval

    def stopping(self: loop.Trainer, rows: list[dict], log: object) -> None:
        after_interval(self, rows, log)
        if rows and rows[-1]["step"] == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_after_interval", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(patch, out, "fp32")
    assert not (out / "results.json").exists()
    results = run(monkeypatch, out, "fp32", MASTER, SPLIT)
    straight = run(monkeypatch, out.with_name("straight"), "fp32")
    assert results["fp32"]["3"]["losses_sha256"] == straight["fp32"]["3"]["losses_sha256"]
    assert results[MASTER]["3"]["losses_sha256"] == results[SPLIT]["3"]["losses_sha256"]
    assert results[MASTER]["3"]["losses_sha256"] != results["fp32"]["3"]["losses_sha256"]
    table = capsys.readouterr().out
    assert f"every loss bitwise that of {MASTER}: kept" in table and "missed" not in table

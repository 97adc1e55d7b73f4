"""Tests of benchmarks/optim/train_optimizers.py on a short text.

The tests compare fp32 master weights with bf16 weights plus remainders, resume an interrupted run, and check
the printed table.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3]))
from benchmarks.optim import train_optimizers
from shoestring.training.run import loop

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


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, *variants: str, steps: int = STEPS, demo: bool = False
) -> dict:
    arguments = ["--out", str(out), "--steps", str(steps), "--seeds", "3", "--variants", *variants]
    arguments += ["--demo"] if demo else []
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


def test_the_demo_with_another_optimizer(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = train_optimizers.DEMO
    small = replace(demo, config=replace(demo.config, seq_len=64, batch_size=4))
    monkeypatch.setattr(train_optimizers, "DEMO", small)
    names = ("torch", "bitsandbytes", "fp32", "8bit")
    results = run(monkeypatch, out, *names, steps=3, demo=True)
    losses = {name: results[name]["3"]["val_loss"] for name in names}
    # The states differ after the first step alone, and hardly within three.
    assert len({losses[name] for name in ("bitsandbytes", "fp32", "8bit")}) == 3, losses
    assert all(losses[name] == pytest.approx(losses["torch"], rel=1e-3) for name in names), losses
    assert {results[name]["3"]["parameters"] for name in names} == {results["torch"]["3"]["parameters"]}

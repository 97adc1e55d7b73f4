"""Test that the QLoRA memory benchmark runs, and that its formula predicts the memory of a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shoestring
from shoestring.training import memory

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_formula_counts_what_is_there(tmp_path: Path, benchmarks: None) -> None:
    from benchmarks.adapters.qlora_memory import RANK, predicted_bytes
    from benchmarks.random_llama import write_random_llama

    shape = dict(hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=2, vocab_size=512)
    write_random_llama(tmp_path / "model", **shape)
    parts = predicted_bytes(shape, tokens=64, workspace=1 << 20)
    model = shoestring.load_quantized(tmp_path / "model", double_quant=True)
    weights = parts["linear weights, 4.127 bits"] + parts["embedding and head, bf16"]
    # The formula omits the norms and, for each weight, the 1 KB table that decodes its quantised scales.
    assert memory.weight_bytes(model) == pytest.approx(weights, rel=0.02)
    shoestring.lora.apply(model, rank=RANK)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert 2 * memory.storage_bytes(trained) == parts["adapters, fp32, and their gradients"]
    optimizer = shoestring.optim.AdamW(trained)
    for p in trained:
        p.grad = p.detach().clone()
    optimizer.step()
    assert memory.optimizer_bytes(optimizer) == pytest.approx(parts["AdamW's 8-bit state"], rel=0.01)


# test_the_formula_counts_what_is_there covers the numbers that this benchmark prints.
@pytest.mark.nightly
def test_it_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.adapters.bench_qlora",
        "--memory",
        "--quick",
        "--json",
        report,
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    found = json.loads(report.read_text())["memory"]["python"]
    assert "predicted" in output and list(found["phases"]) == [
        "imports",
        "loaded",
        "step 1",
        "step 2",
        "step 3",
    ]
    assert found["phases"]["step 3"]["peak"] < 1.1 * found["predicted"]

"""Test that the benchmark of training steps counts matrix products correctly, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def flops(run: Callable[[], object]) -> tuple[float, float]:
    """Return the number of products and of floating-point operations in ``run()``."""
    from benchmarks.step.products import Recorder

    with Recorder() as recorder:
        run()
    return sum(recorder.counts.values()), recorder.flops()


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_has_three_products(bias: bool) -> None:
    layer, x = nn.Linear(5, 7, bias=bias), torch.randn(2, 3, 5, requires_grad=True)
    assert flops(lambda: layer(x).sum().backward()) == (3, 3 * 2 * 6 * 5 * 7)


@pytest.mark.parametrize(("causal", "part"), [(False, 1), (True, 0.5)])
def test_attention_has_six_products(causal: bool, part: float) -> None:
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    found = flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward())
    assert found == (6 * part, 6 * part * 2 * 6 * 8 * 8 * 16)


@pytest.mark.parametrize(("needs_grad", "products"), [(True, 3), (False, 2)])
def test_a_convolution_counts_its_output(needs_grad: bool, products: int) -> None:
    layer, x = nn.Conv2d(4, 6, 3, stride=2, padding=1), torch.randn(2, 4, 9, 9, requires_grad=needs_grad)
    _, found = flops(lambda: layer(x).sum().backward())
    assert found == products * 2 * (2 * 6 * 5 * 5) * (4 * 3 * 3)


def test_the_ceiling_is_measured_for_every_product() -> None:
    from benchmarks.step.products import Ceiling, Recorder

    layer, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    with Recorder() as recorder:
        layer(x).sum().backward()
    ceiling = Ceiling(recorder)
    assert ceiling.count == sum(ceiling.chosen.values()) == sum(row["count"] for row in ceiling.rows) == 3
    assert 0 < ceiling.seconds() < 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "products"),
        ("shoestring::_lora_linear_group_backward", "products"),
        ("shoestring::_linear_cross_entropy_rows", "loss"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("shoestring::_rms_norm_forward", "norms, activations"),
        ("aten::_fused_adamw_", "optimizer"),
        ("graph_0_cpp_fused_add_embedding_mean_mul_0", "compiled kernels"),
        ("aten::copy_", "copies, casts"),
        ("aten::add", "element by element"),
        ("aten::view", "rest"),
    ],
)
def test_operators_belong_to_groups(name: str, expected: str) -> None:
    from benchmarks.step.where import group

    assert group(name) == expected


@pytest.mark.nightly
def test_it_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.bench_step", "--quick", "--repeats", "1", "--json", report]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    tables = {table["title"].split(":")[0]: table for table in json.loads(report.read_text())["tables"]}
    assert {"llama-amp", "resnet-fp32"} <= tables.keys()
    assert "failed" not in output and "the ceiling" in output and "where the time goes" in output


@pytest.mark.nightly
def test_it_compares_losses(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.bench_step", "--quick", "--losses", "--only", "llama-fp32", "--json", report]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (table,) = json.loads(report.read_text())["tables"]
    yardstick, fp32, _ = (max(v for k, v in row.items() if k != "name") for row in table["rows"])
    assert 0 < yardstick < 1e-3 and fp32 < 1e-3

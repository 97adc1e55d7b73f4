"""Test learning-rate schedules, atomic file writes, the memory meter, and training checkpoints."""

from __future__ import annotations

import errno
import json
import math
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from file_limit import file_limit
from shoestring.core.errors import InputError
from shoestring.files.atomic import atomic_directory, atomic_file
from shoestring.training import memory
from shoestring.training.config import LoopConfig, require_equal
from shoestring.training.report.metrics import COLUMNS, MetricsLog, read_metrics
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint, save_checkpoint


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.9, 0.5, 0.1]),
        ("cosine", [1, 0.5 + 0.5 * math.cos(math.pi / 10), 0.5, 0.5 + 0.5 * math.cos(0.9 * math.pi)]),
        ("wsd", [1, 1, 1, 0.5]),
        ("flat-cos", [1, 1, 1, 0.5 + 0.5 * math.cos((0.9 - 0.72) / 0.28 * math.pi)]),
        ("inverse-sqrt", [1, math.sqrt(2 / 3), math.sqrt(2 / 7), math.sqrt(2 / 11)]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = LoopConfig(lr=2.0, steps=12, warmup=2, schedule=schedule)
    rates = [config.learning_rates()(step) for step in (0, 1, 2, 3, 7, 11)]
    assert rates == pytest.approx([2 * value for value in [1 / 3, 2 / 3, *expected]])


def test_a_warmup_may_be_longer_than_the_run() -> None:
    config = LoopConfig(lr=1.0, steps=4, warmup=100)
    assert [config.learning_rates()(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"), atomic_file(tmp_path / "a") as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "d") as folder:
        (folder / "x").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_directory_replaces_the_one_before(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with atomic_directory(tmp_path / "d") as folder:
            (folder / "config.json").write_text(content)
    assert [p.name for p in tmp_path.rglob("*")] == ["d", "config.json"]
    assert (tmp_path / "d/config.json").read_text() == "two"


def test_memory_meter_sees_an_allocation() -> None:
    before, peak = memory.resident_bytes(), memory.peak_bytes()
    # mmap gets new pages from the system; a tensor could reuse memory that the process already has
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"x" * len(block))
        assert memory.resident_bytes() - before > 60 << 20
    assert memory.peak_bytes() >= max(peak, before + (60 << 20))


def test_storages_count_once() -> None:
    base = torch.zeros(100)
    assert memory.storage_bytes([base, base[:10], base.view(10, 10), torch.zeros(5)]) == 420
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert (
        memory.optimizer_bytes(optimizer) == 2 * 4 * 110 + 2 * 4
    )  # AdamW's state: two fp32 moments per element, and one fp32 step count per parameter tensor


def test_saved_activations_leave_weights_out() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with memory.SavedActivations(model) as saved:
        model(torch.ones(32, 8))
    assert saved.bytes == 32 * (8 + 16) * 4


def make(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(width, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def made(width: int = 4) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model, optimizer = make(width)
    return model, [optimizer]


def test_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    model, optimizer = make()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, model, [optimizer], {"val_loss": 0.1 + 0.2})
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    expected = torch.rand(3)
    other, other_optimizer = make()
    with torch.no_grad():
        other.weight.zero_()
    other_optimizer.zero_grad()
    state = load_checkpoint(checkpoints(tmp_path)[-1], other, [other_optimizer])
    assert state == {"step": 3, "val_loss": 0.1 + 0.2}
    assert torch.equal(torch.rand(3), expected) and torch.equal(other.weight, model.weight)
    for a, b in zip(optimizer.state.values(), other_optimizer.state.values()):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "state.json"])
def test_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 1, model, [optimizer], {})
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(InputError, match="step-00000001: the checkpoint is damaged"):
        load_checkpoint(folder, *made())


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, *made(), {})
    with pytest.raises(InputError, match=r"weight is \[3, 4\] torch.float32 in the checkpoint, \[3, 5\]"):
        load_checkpoint(folder, *made(5))


def test_fingerprint_names_the_field() -> None:
    recorded = LoopConfig().fixed() | {"data": [["a", 1]]}
    require_equal(LoopConfig().fixed() | {"data": [["a", 1]]}, recorded, "run")
    with pytest.raises(InputError, match="lr differs: the run has 0.001, this command has 0.1"):
        require_equal(LoopConfig(lr=0.1).fixed() | {"data": [["a", 1]]}, recorded, "run")


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, float]] = [{**dict.fromkeys(COLUMNS, 1.5), "step": step} for step in (1, 2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"ste')
    with MetricsLog(path, keep_through=2) as log:
        log.add({**rows[2], "val_loss": 2.0})
    assert log.lost == 0 and read_metrics(path) == [*rows[:2], {**rows[2], "val_loss": 2.0}]


def test_a_row_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that has room for a part of a row writes that part, without an error."""
    path = tmp_path / "metrics.jsonl"
    rows: list[dict[str, float]] = [{**dict.fromkeys(COLUMNS, 1.5), "step": step} for step in (1, 2, 3)]
    with MetricsLog(path, keep_through=0) as log:
        log.add(rows[0])
        size = path.stat().st_size
        for room in (size // 2, 0, size - 1):
            with file_limit(size + room), pytest.raises(OSError, match="File too large") as raised:
                log.add(rows[1])
            assert raised.value.filename == str(path) and path.stat().st_size == size
        for row in rows[1:]:
            log.add(row)
    assert read_metrics(path) == rows

"""Tests that ``average_checkpoints`` averages files and sharded folders, and writes nothing after an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.optim import average_checkpoints

U = 2.0**-24  # unit roundoff of fp32


def tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "fp32": torch.randn(3, 70_001),
        "bf16": torch.randn(300).bfloat16(),
        "fp16": torch.randn(2, 3, 5).half(),
        "fp64": torch.randn(7, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "number": torch.randn(()),
        "int": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "codes": torch.arange(9, dtype=torch.uint8),
    }


def save_sharded(values: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir()
    names = sorted(values)
    shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for shard, own in shards.items():
        save_file({n: values[n] for n in own}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: shard for shard, own in shards.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2], [1.5, -0.25, -0.25]])
def test_files_and_sharded_folders_are_averaged(weights: list[float] | None, tmp_path: Path) -> None:
    inputs = [tensors(seed) for seed in range(3)]
    save_file(inputs[0], tmp_path / "a.safetensors", metadata={"format": "pt", "note": "first"})
    save_sharded(inputs[1], tmp_path / "b")
    (tmp_path / "c").mkdir()
    save_file(inputs[2], tmp_path / "c" / "model.safetensors")
    out = tmp_path / "out.safetensors"
    average_checkpoints([tmp_path / "a.safetensors", tmp_path / "b", str(tmp_path / "c")], out, weights)
    found = load_file(out)
    assert found.keys() == inputs[0].keys()
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "first"}
    factors = weights or [1 / 3] * 3
    for name, value in found.items():
        own = [t[name] for t in inputs]
        assert value.dtype == own[0].dtype and value.shape == own[0].shape
        if not value.is_floating_point():
            assert torch.equal(value, own[0])
            continue
        exact = sum(f * t.double() for f, t in zip(factors, own, strict=True))
        size = sum(abs(f) * t.double().abs() for f, t in zip(factors, own, strict=True))
        unit = 2.0**-53 if value.dtype == torch.float64 else U
        # Each of three products, sums and factors is rounded, and then the result once.
        bound = 9 * unit * size + torch.finfo(value.dtype).eps / 2 * exact.abs()
        assert bool(((value.double() - exact).abs() <= bound).all()), name


def test_equal_checkpoints_have_themselves_as_average(tmp_path: Path) -> None:
    """A 16-bit tensor comes back bit for bit, and the output may replace an input."""
    values = {n: t for n, t in tensors(0).items() if n in ("bf16", "fp16", "int")}
    path = tmp_path / "a.safetensors"
    save_file(values, path)
    for count in (1, 3, 7):
        average_checkpoints([path] * count, path)
        assert all(torch.equal(t, values[n]) for n, t in load_file(path).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"int": torch.arange(1, 6)},
            'tensor "int": expected the values of the first checkpoint, because Long cannot',
        ),
        ({"codes": None}, r'tensor "codes": expected Byte \[9\], as in the first checkpoint, received none'),
        (
            {"more": torch.zeros(1)},
            'tensor "more": expected only tensors of the first checkpoint, received another',
        ),
        (
            {"fp32": torch.zeros(3, 2)},
            r'tensor "fp32": expected Float \[3, 70001\], .*, received Float \[3, 2\]',
        ),
        ({"bf16": torch.zeros(300)}, r'tensor "bf16": expected BFloat16 \[300\], .*, received Float \[300\]'),
    ],
)
def test_checkpoints_that_differ_raise_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")
    save_file(tensors(0), tmp_path / "a.safetensors")
    other = {n: t for n, t in {**tensors(1), **change}.items() if t is not None}
    save_file(other, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=rf"^average_checkpoints: .*b.safetensors: {message}") as error:
        average_checkpoints([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], out)
    assert len(str(error.value).splitlines()) == 1
    assert out.read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "out.safetensors"]


def test_other_errors(tmp_path: Path) -> None:
    path, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    save_file(tensors(0), path)
    for weights, message in [
        ([0.5, 0.6], "weights: expected numbers whose sum is 1, received the sum 1.1"),
        ([float("nan"), 1.0], "weights: expected numbers whose sum is 1, received the sum nan"),
        ([1.0], "weights: expected 2 numbers, one for each path, received 1"),
    ]:
        with pytest.raises(ValueError, match=f"^average_checkpoints: {message}"):
            average_checkpoints([path, path], out, weights)
    with pytest.raises(ValueError, match="^average_checkpoints: paths: expected at least one checkpoint"):
        average_checkpoints([], out)
    with pytest.raises(FileNotFoundError):
        average_checkpoints([path, tmp_path / "missing"], out)
    (tmp_path / "damaged.safetensors").write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged.safetensors: the header describes"):
        average_checkpoints([path, tmp_path / "damaged.safetensors"], out)
    with pytest.raises(FileNotFoundError):
        average_checkpoints([path], tmp_path / "missing" / "out.safetensors")
    assert not out.exists()


MEASURE = """
import resource, sys
import torch
from shoestring.optim import average_checkpoints
average_checkpoints([sys.argv[1]], sys.argv[2])  # loads everything that the library needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
average_checkpoints(sys.argv[3:], sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    """Three files of 8 bf16 tensors of 8 MiB: 8 MiB for a tensor, 16 MiB for its sum, and 8 MiB of slack."""
    save_file({"x": torch.zeros(2)}, tmp_path / "small.safetensors")
    files = []
    for seed in range(3):
        files.append(tmp_path / f"{seed}.safetensors")
        save_file({f"t{i}": torch.zeros(4 << 20, dtype=torch.bfloat16) for i in range(8)}, files[-1])
    command = [
        sys.executable,
        "-c",
        MEASURE,
        tmp_path / "small.safetensors",
        tmp_path / "out.safetensors",
        *files,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) <= 32 * 1024

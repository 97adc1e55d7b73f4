"""Test save_safetensors, with which optimizers and adapters write files that the package safetensors reads."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from file_limit import file_limit
from shoestring.files.safetensors_file import save_safetensors

DTYPES = [
    torch.uint64, torch.int64, torch.float64, torch.complex64, torch.float32, torch.uint32, torch.int32, torch.bfloat16,
    torch.float16, torch.uint16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (torch.randn(shape) * 50).to(dtype)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        f"{dtype} {shape}": some(dtype, shape) for dtype in DTYPES for shape in ((), (0,), (3, 5), (1, 7, 2))
    }
    tensors |= {
        "strided": torch.randn(6, 4).t()[1:],
        "trained": torch.randn(5, requires_grad=True),
        "Grüße": torch.ones(1),
    }
    save_safetensors(tmp_path / "file", tensors, {"groups": '[{"a": "ü"}]'})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor.detach()), name
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"groups": '[{"a": "ü"}]'}
    save_safetensors(tmp_path / "none", {}, {})
    assert load_file(tmp_path / "none") == {}


def test_mapped_memory_is_whole_after_it_was_written(tmp_path: Path) -> None:
    """save_safetensors drops a mapped tensor's memory pages, but no changes that are not on disk yet."""
    size = 5 << 20
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=size, dtype=torch.float32)
    mapped.copy_(torch.arange(size))
    private = torch.from_file(str(tmp_path / "mapped"), shared=False, size=size, dtype=torch.float32)
    # `private` is a private mapping, so this change is in memory and not in the file.
    private.add_(1)
    save_safetensors(tmp_path / "file", {"mapped": mapped[3:], "private": private}, {})
    found = load_file(tmp_path / "file")
    assert torch.equal(found["mapped"], torch.arange(3, size).float()) and torch.equal(
        mapped, torch.arange(size).float()
    )
    assert torch.equal(found["private"], mapped + 1) and torch.equal(private, mapped + 1)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match='save_safetensors: .*/file: tensor "a": safetensors has no dtype for ComplexDouble'
    ):
        save_safetensors(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
    with file_limit(100_000), pytest.raises(OSError, match=f"File too large: '{tmp_path}/file'"):
        save_safetensors(tmp_path / "file", {"a": torch.zeros(1 << 20)}, {})
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{tmp_path}/none/file'"):
        save_safetensors(tmp_path / "none" / "file", {}, {})
    with pytest.raises(ValueError, match="expected names and metadata in UTF-8"):
        save_safetensors(tmp_path / "file", {b"\xff": torch.ones(1)}, {})  # type: ignore[dict-item]


def test_paths_of_any_bytes(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff"
    save_safetensors(os.fsdecode(path), {"a": torch.ones(2)}, {})
    assert os.path.getsize(path) > 8

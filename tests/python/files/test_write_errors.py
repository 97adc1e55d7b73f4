"""Test that an error of writing names the file, whichever library writes, and that nothing half written stays."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from file_limit import file_limit
from shoestring.cli.app import reason
from shoestring.cli.monitor import _write
from shoestring.core.errors import InputError
from shoestring.files.atomic import atomic_directory, atomic_file
from shoestring.files.lock import locked
from shoestring.files.safetensors_file import save_safetensors
from shoestring.files.write_file import open_to_write, write_text
from shoestring.runs.find_lr import LrPass, LrRange


def text(folder: Path) -> None:
    (folder / "sub").mkdir()
    write_text(folder / "sub" / "file", "x" * 900)


def save(folder: Path) -> None:
    with open_to_write(folder / "file") as file:
        torch.save({"a": torch.zeros(1000)}, file)


def vocabulary(folder: Path) -> None:
    Tokenizer(WordLevel({f"word{n}": n for n in range(500)}, "word0")).save(str(folder / "other"))


@pytest.mark.parametrize("size", [500, 100_000])
def test_a_file(size: int, tmp_path: Path) -> None:
    """The write of a small file fails when its buffer is flushed, that of a large one at once."""
    path = tmp_path / "file"
    path.write_text("former")
    with file_limit(100), pytest.raises(OSError, match="File too large") as raised, atomic_file(path) as file:
        file.write(b"x" * size)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "former" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (
            lambda folder: (folder / "sub").mkdir() or write_text(folder / "sub" / "file", "x" * 900),
            "sub/file",
        ),
        (lambda folder: save_safetensors(folder / "file", {"a": torch.zeros(900)}, {}), "file"),
        (save, "file"),
        # These libraries do not say which file it was.
        (lambda folder: (folder / "other").write_text("x" * 900), "."),
        (lambda folder: save_file({"a": torch.zeros(900)}, folder / "other"), "."),
        (vocabulary, "."),
    ],
    ids=["text", "safetensors", "torch.save", "Python", "Rust", "tokenizers"],
)
def test_a_file_in_a_folder(write: Callable[[Path], None], named: str, tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with (
        pytest.raises(OSError, match="File too large") as raised,
        atomic_directory(path) as partial,
        file_limit(300),
    ):
        write(partial)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path / named))
    assert reason(raised.value) == f"{path / named}: File too large; what was complete before is kept"
    assert os.listdir(tmp_path) == []


def test_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="error") as raised, atomic_file(tmp_path / "file") as file:
        file.write(b"x")
    assert raised.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError, match="error") as raised, atomic_directory(tmp_path / "folder") as partial:
        (partial / "x").touch()
    assert raised.value.filename == str(tmp_path / "folder" / "x")


def test_a_file_system_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with atomic_directory(tmp_path / "folder") as partial, atomic_file(partial / "file") as file:
        file.write(b"x")
    assert (tmp_path / "folder" / "file").read_bytes() == b"x"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no disk"),
        OSError(errno.EIO, "of a file that the block reads"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/file"),
        RuntimeError(f"offload_weights: /elsewhere: cannot write: {os.strerror(errno.ENOSPC)}"),
        InputError(f"--out: {os.strerror(errno.ENOSPC)}"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    words = str(error)
    for writing in (atomic_file, atomic_directory):
        with pytest.raises(type(error)) as raised, writing(tmp_path / "a"):
            raise error
        assert raised.value is error and str(error) == words


def test_the_text_of_an_error_is_kept() -> None:
    text = f"offload: /swap/file: cannot write: {os.strerror(errno.ENOSPC)}; free some space"
    assert reason(RuntimeError(text + "\nmore")) == f"writing: {text}; what was complete before is kept"


def test_reports_and_plots(tmp_path: Path) -> None:
    plot = LrRange((LrPass((1e-3, 1e-2), (1.0, 0.5), 1e-2, 1e-3),), 1e-2, 1.0).plot
    report: Any = SimpleNamespace(to_json=lambda: "x" * 900)
    for name, write in (("plot.png", plot), ("report.json", lambda path: _write(report, None, path))):
        with file_limit(300), pytest.raises(OSError, match="File too large") as raised:
            write(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name), name


def test_a_lock_file_without_room_is_no_lock(tmp_path: Path) -> None:
    """A part of the holder's name would be read as another holder."""
    path = tmp_path / ".lock"
    with (
        file_limit(3),
        pytest.raises(InputError, match=f"--out x: cannot write there .File too large: {path}"),
        locked(path, "--out x"),
    ):
        raise AssertionError("the block has begun")

"""Files that are whole or absent: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"  # suffix of everything that is still being written


def fsync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the name under which to write a file; it appears under ``path`` when the block ends without an exception.

    Two processes that write one path do not share the temporary file.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under ``path`` only when the block ends without an exception."""
    with atomic_path(path) as partial, open(partial, "wb") as file:
        yield file


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; it is renamed to ``path`` when the block ends, or removed after an exception."""
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_dir():
                fsync_directory(file)
                continue
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        fsync_directory(partial)
        if path.exists():
            shutil.rmtree(path)
        os.replace(partial, path)
        fsync_directory(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def remove_partial(folder: Path) -> None:
    """Remove what a killed process left half-written directly inside ``folder``."""
    for leftover in folder.glob("*" + PARTIAL):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def disk_error(error: BaseException) -> OSError | None:
    """Return the disk's refusal (full, quota, read-only, no permission, broken) behind ``error``, if it is one.

    Libraries that write files wrap the system's error or keep only its text.
    """
    refusals = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in refusals:
            return seen
        seen = seen.__cause__ or seen.__context__
    if os.strerror(errno.ENOSPC) in str(error):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None

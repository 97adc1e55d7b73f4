"""Files and folders that are whole or absent: temporary name, fsync, rename or exchange, fsync of the folder."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"  # suffix of everything that is still being written
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# A model's own files. A folder that replaces another one keeps all other files of its predecessor.
MODEL_FILES = re.compile(
    r"(generation_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def _fsync(path: Path) -> None:
    """Make a file, or the names inside a folder, durable."""
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
        _fsync(partial)
        os.replace(partial, path)
        _fsync(path.parent)
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
    """Yield a folder to fill; it takes the place of ``path`` when the block ends, or is removed after an exception.

    A former folder and the new one are exchanged in one step. Files of the former folder stay, unless they are a
    model's own (``MODEL_FILES``) or the new folder has files of their names. Where ``exchange_obstacle`` finds one,
    the files are replaced one by one: a crash meanwhile leaves a folder without config.json.

    Raises:
        OSError: the folder cannot be written. A former folder is as before, unless its files were replaced one by one.
    """
    path = Path(os.path.realpath(path))  # a symbolic link to a folder stays one
    if path.exists() and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    in_place = path.exists() and exchange_obstacle(path) is not None
    with _partial_folder(path if in_place else path.parent, path.name) as partial:
        yield partial
        for folder, _, names in os.walk(partial):
            for name in names:
                _fsync(Path(folder, name))
        if path.exists() and not in_place:
            _keep_files(path, partial)
            _copy_attributes(path, partial)
        for folder, _, _ in os.walk(partial):
            _fsync(Path(folder))
        if in_place:
            _replace_files(partial, path)
        else:
            _put(partial, path)
            _fsync(path.parent)
            with suppress(FileNotFoundError):  # there was no former folder, or another process removes it
                _keep_files(partial, path)  # files that were written there since


def exchange_obstacle(path: Path) -> str | None:
    """Say why another folder cannot take the place of the folder ``path`` in one step; return None where it can."""
    path = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):  # the current directory was removed
        if Path.cwd().is_relative_to(path):
            return "it is, or holds, the current directory"
    if os.path.ismount(path):
        return "it is a mount point"
    try:
        with _partial_folder(path.parent, path.name) as probe:
            for name in ("a", "b"):
                (probe / name).mkdir()
            _exchange(probe / "a", probe / "b")
            (probe / "c").touch()
            os.link(probe / "c", probe / "d")
    except OSError as error:
        return f"in {path.parent} folders cannot be exchanged or files linked ({error.strerror})"
    return None


def is_partial(name: str, of: str) -> bool:
    """Tell whether ``name`` is one that ``atomic_directory`` gives a folder while it fills it for one named ``of``."""
    return re.fullmatch(re.escape(of) + r"\.[0-9a-f]{8}" + re.escape(PARTIAL), name) is not None


@contextmanager
def _partial_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a folder in ``parent``; at the end remove whatever has its name then. Remove those that dead processes left.

    A lock on the folder tells other processes that its process is alive.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.iterdir():
        if is_partial(stale.name, name):
            with suppress(OSError):
                descriptor = os.open(stale, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(stale, ignore_errors=True)
                finally:
                    os.close(descriptor)
    while True:
        partial = parent / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
        partial.mkdir()
        with suppress(FileNotFoundError):
            descriptor = os.open(partial, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if partial.exists():  # else another process removed it as a dead one's, before it was locked
                break
            os.close(descriptor)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _keep_files(former: Path, new: Path, inside: bool = False) -> None:
    """Link the files of ``former`` into ``new`` that are not there; ``inside``: below the folder of a model."""
    for entry in list(os.scandir(former)):
        target = new / entry.name
        if not inside and MODEL_FILES.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            if os.path.ismount(entry.path):
                raise OSError(errno.EBUSY, "a folder with a mount point in it cannot be replaced", entry.path)
            made = not target.exists()
            target.mkdir(exist_ok=True)
            _keep_files(Path(entry.path), target, inside=True)
            if made:
                _copy_attributes(Path(entry.path), target)
        elif not os.path.lexists(target):
            os.link(entry.path, target, follow_symlinks=False)


def _copy_attributes(former: Path, new: Path) -> None:
    """Give a folder the mode and times of another, and its owner where the system allows it."""
    status = former.stat()
    with suppress(PermissionError):
        os.chown(new, status.st_uid, status.st_gid)
    shutil.copystat(former, new)


def _put(new: Path, path: Path) -> None:
    """Rename a folder to ``path``; a former one that is not empty takes its name, in the same step."""
    try:
        os.replace(new, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(new, path)


def _exchange(first: Path, second: Path) -> None:
    """Swap two names in one step."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of Linux alone
    paths = os.fsencode(first), os.fsencode(second)
    if rename is None or rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) != 0:
        error = errno.ENOSYS if rename is None else ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(first), None, str(second))


def _replace_files(new: Path, path: Path) -> None:
    """Move the files of ``new`` into ``path``, over those of a model.

    config.json and the index of the shards go first; the new ones come last. No loader takes the folder in between.
    """
    last = (INDEX, CONFIG)
    for name in reversed(last):
        (path / name).unlink(missing_ok=True)
        _fsync(path)
    names = os.listdir(new)
    for name in sorted(set(names).difference(last)):
        if (new / name).is_dir() and (path / name).is_dir():
            _replace_files(new / name, path / name)
        else:
            os.replace(new / name, path / name)
    for name in set(filter(MODEL_FILES.fullmatch, os.listdir(path))).difference(names):
        (path / name).unlink()
    for name in last:
        _fsync(path)
        if name in names:
            os.replace(new / name, path / name)
    _fsync(path)


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
    """Return the disk's refusal (full, quota, limit, name, read-only, no permission, broken) behind ``error``, if it is one.

    Libraries that write files wrap the system's error or keep only its text.
    """
    of_writing = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (
            *of_writing,
            errno.EACCES,
            errno.EPERM,
            errno.ENAMETOOLONG,
        ):
            return seen
        seen = seen.__cause__ or seen.__context__
    for code in of_writing:
        if os.strerror(code) in str(error):
            return OSError(code, os.strerror(code))
    return None

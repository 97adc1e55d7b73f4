"""Write files and folders atomically: write under a temporary name, fsync, rename or exchange, fsync."""

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

from shoestring.files.write_file import naming, open_to_write

PARTIAL = ".partial"  # suffix of the temporary names of files and folders that are still being written
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# Names of files that belong to a model. When a new folder replaces an old one, all other files of the old
# folder are kept.
MODEL_FILES = re.compile(
    r"(generation_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
# Errors that only writing has: no room, a quota or limit that is used up, a read-only file system.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants from Linux headers for the system call renameat2


def _fsync(path: Path) -> None:
    """Call fsync on a file, or on a folder, so that its content or list of names is on disk.

    File systems that cannot sync folders return EINVAL, which is ignored.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _named(partial: Path, path: Path) -> Iterator[None]:
    """Let an error of writing in the ``with`` block name a final file: ``path``, or one in the folder ``path``.

    The block writes ``partial``, which then becomes ``path``. Libraries raise errors without the name of a file.
    """
    try:
        yield
    except Exception as error:
        os_error = _os_error(error)
        # Libraries in Rust raise exceptions of other types, with the number of the error in their text.
        number = re.search(r"\(os error (\d+)\)", str(error)) if os_error is None else None
        if number is not None:
            os_error = OSError(int(number[1]), os.strerror(int(number[1])))
        if os_error is None:
            raise
        if isinstance(os_error.filename, str) and Path(os_error.filename).is_relative_to(partial):
            os_error.filename = str(path / Path(os_error.filename).relative_to(partial))
        elif os_error.filename is None and os_error.errno in NO_ROOM:
            os_error.filename = str(path)
        else:
            raise
        # torch.save raises a RuntimeError about its own state while it handles the OSError.
        if number is not None or type(error) is RuntimeError:
            raise OSError(os_error.errno, os_error.strerror, os_error.filename) from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary binary file; rename it to ``path`` if the ``with`` block ends without an exception.

    The temporary name contains the process id, so two processes that write to the same ``path`` use different
    temporary files. Errors of writing name ``path``.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with _named(partial, path):
            with open_to_write(partial) as file:
                yield file
            _fsync(partial)
            os.replace(partial, path)
            _fsync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces ``path`` when the block ends. An exception removes the new folder.

    If ``path`` already exists, the two folders are exchanged in one step. Files of the former folder are
    kept, unless they belong to a model (``MODEL_FILES``) or the new folder has a file of the same name. If
    ``exchange_obstacle`` returns a reason, the files in ``path`` are replaced one by one instead. A crash
    during the replacement leaves a folder without config.json.

    Raises:
        OSError: the folder cannot be written. The error names the file, or the folder if a library has not said
            which file it was. An existing folder is unchanged, unless its files were replaced one by one.
    """
    # If path is a symbolic link, the link stays, and the folder to which it points is replaced.
    path = Path(os.path.realpath(path))
    if path.exists() and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    in_place = path.exists() and exchange_obstacle(path) is not None
    with _partial_folder(path if in_place else path.parent, path.name) as partial, _named(partial, path):
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
            # After an exchange, `partial` is the name of the former folder. Files that other processes wrote
            # into the former folder in the meantime are kept. `partial` does not exist if there was no former
            # folder, or if another process has removed it.
            with suppress(FileNotFoundError):
                _keep_files(partial, path)


def exchange_obstacle(path: Path) -> str | None:
    """Return why the folder ``path`` cannot be exchanged with another one in one step, or None if it can."""
    path = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):  # Path.cwd() raises this error if the current directory was removed
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
    """Return whether ``atomic_directory`` uses ``name`` as a temporary name for a folder named ``of``."""
    return re.fullmatch(re.escape(of) + r"\.[0-9a-f]{8}" + re.escape(PARTIAL), name) is not None


@contextmanager
def _partial_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a temporary folder in ``parent``, and remove it at the end of the ``with`` block.

    Temporary folders for ``name`` that dead processes have left are removed first. The process locks its
    temporary folder, so that other processes know that the folder is in use.
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
            with suppress(OSError):  # some file systems do not support locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another process may have removed the temporary folder before this process locked it. The loop
            # then creates another one.
            if partial.exists():
                break
            os.close(descriptor)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _keep_files(former: Path, new: Path, inside: bool = False) -> None:
    """Hard-link the files of ``former`` that ``new`` does not have into ``new``.

    Directly inside ``former``, files of a model (``MODEL_FILES``) are left out. In its subfolders (``inside``
    is True), all files are linked.
    """
    for entry in list(os.scandir(former)):
        target = new / entry.name
        if not inside and MODEL_FILES.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            if os.path.ismount(entry.path):
                raise OSError(errno.EBUSY, "a folder with a mount point in it cannot be replaced", entry.path)
            is_new = not target.exists()
            target.mkdir(exist_ok=True)
            _keep_files(Path(entry.path), target, inside=True)
            if is_new:
                _copy_attributes(Path(entry.path), target)
        elif not os.path.lexists(target):
            os.link(entry.path, target, follow_symlinks=False)


def _copy_attributes(former: Path, new: Path) -> None:
    """Copy the mode and the times of ``former`` to ``new``, and the owner if the system allows it."""
    status = former.stat()
    with suppress(PermissionError):
        os.chown(new, status.st_uid, status.st_gid)
    shutil.copystat(former, new)


def _put(new: Path, path: Path) -> None:
    """Rename the folder ``new`` to ``path``; if ``path`` is not empty, exchange the folders in one step."""
    try:
        os.replace(new, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(new, path)


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two files or folders in one system call."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # only Linux has renameat2
    paths = os.fsencode(first), os.fsencode(second)
    if rename is None or rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) != 0:
        error = errno.ENOSYS if rename is None else ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(first), None, str(second))


def _replace_files(new: Path, path: Path) -> None:
    """Move the files of ``new`` into ``path``; remove model files in ``path`` that ``new`` does not have.

    config.json and the index of the shards are removed first and written last. A loader refuses a folder
    without these two files, so it never reads a mixture of old and new files.
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
    """Write ``value`` as indented JSON to the file ``path``, atomically."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def remove_partial(folder: Path) -> None:
    """Remove the incomplete files and folders that a killed process left directly inside ``folder``."""
    for leftover in folder.glob("*" + PARTIAL):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def disk_error(error: BaseException) -> OSError | None:
    """Return the OSError behind ``error`` if writing failed for a reason outside the program, else None.

    Such reasons are: the disk is full or broken, a quota or size limit, a name that is too long, a read-only
    file system, missing permission. Libraries that write files may wrap the OSError in another exception, or
    keep only its text.
    """
    os_error = _os_error(error)
    if os_error is not None:
        return os_error
    for code in (*NO_ROOM, errno.EIO):
        if os.strerror(code) in str(error):
            return OSError(code, os.strerror(code))
    return None


def _os_error(error: BaseException) -> OSError | None:
    """Return the OSError of ``disk_error`` if ``error`` is one or was raised because of one, else None."""
    codes = (*NO_ROOM, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in codes:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None

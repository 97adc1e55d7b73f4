"""Locks between processes that write the same folder or file. Locks end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoestring.core.errors import InputError
from shoestring.files.write_file import write_all

LOCK = ".lock"  # name of the lock file in an output folder; the C++ examples use the same name
REFUSED = (errno.EACCES, errno.EAGAIN)  # errno values of lockf if another process holds the lock


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock on the file ``path`` inside the ``with`` block, and remove the file afterwards.

    The lock is a POSIX record lock. The kernel frees it when the process ends, and forked children do not
    inherit it. NFS supports it, and the C++ examples (examples/cpp/common/folder_lock.h) use the same lock.
    On a file system that does not support locks, the block runs without a lock.

    Args:
        path: the lock file. Its folder is created if it does not exist. Folders that were created are removed
            if the block leaves them empty.
        what: the command-line option that names the folder, such as "--out runs/a". Error messages begin with
            it.

    Raises:
        InputError: another process holds the lock, or the folder or the file cannot be created.
    """
    created: list[Path] = []
    try:
        try:
            created += [folder for folder in path.parents if not folder.exists()]
            descriptor = _acquire(path, what)
        except OSError as error:
            raise InputError(
                f"{what}: cannot write there ({error.strerror}: {error.filename or path})"
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):
                # Remove the file while the lock is held, so that no other process holds a lock on the removed
                # file.
                path.unlink()
            os.close(descriptor)
    finally:
        with suppress(OSError):  # rmdir raises OSError if a folder is not empty
            for folder in created:
                folder.rmdir()


def _acquire(path: Path, what: str) -> int:
    """Create and lock the lock file ``path``, and return its file descriptor.

    Raises:
        InputError: another process holds the lock.
        OSError: the folder or the file cannot be created.
    """
    for attempt in range(100):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (FileNotFoundError, FileExistsError):
            # another process has just removed the folder of the lock file
            if attempt == 99:
                raise
            continue
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in REFUSED:
                    raise InputError(f"{what}: in use by {_holder(descriptor)}") from None
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                write_all(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The former holder of the lock removed the lock file after this process had opened it. Try again with
        # a new lock file.
        os.close(descriptor)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Describe the process that holds the lock, from the process id in the lock file."""
    words: list[str] = []
    for _ in range(50):
        words = os.pread(descriptor, 300, 0).decode(errors="replace").split()
        if words:
            break
        time.sleep(0.01)  # the holder writes the file just after it has locked it
    if len(words) != 2 or not words[0].isdecimal():
        return "another process"
    return f"process {words[0]}" + ("" if words[1] == socket.gethostname() else f" on {words[1]}")

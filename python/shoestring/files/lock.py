"""Locks between processes that write one folder or file. A lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoestring.core.errors import InputError

LOCK = ".lock"  # its name in a folder; the C++ examples use the same one
REFUSED = (errno.EACCES, errno.EAGAIN)  # another process holds the lock


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path`` inside the block, and remove the file afterwards.

    The lock is a POSIX record lock: the kernel frees it when the process ends, forked children do not inherit it, and
    NFS and the C++ examples (examples/cpp/common/folder_lock.h) know it. A file system without locks is used without.

    Args:
        path: the lock file. The folder that holds it is made if it is absent.
        what: the option at fault, which begins every message, such as "--out runs/a".

    Raises:
        InputError: another process holds the lock, or the file system refuses the folder or the file.
    """
    try:
        descriptor = _acquire(path, what)
    except OSError as error:
        raise InputError(f"{what}: cannot write there ({error.strerror}: {error.filename or path})") from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is freed: nobody else may own the file yet
        os.close(descriptor)


def _acquire(path: Path, what: str) -> int:
    """Return the descriptor of the lock file, which is locked."""
    for attempt in range(100):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (FileNotFoundError, FileExistsError):  # another process has just removed the folder
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
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder removed this file between our open and our lock
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """The process that the lock file names. The holder writes it just after it has the lock."""
    words = os.pread(descriptor, 300, 0).decode(errors="replace").split()
    if len(words) != 2 or not words[0].isdecimal():
        return "another process"
    return f"process {words[0]}" + ("" if words[1] == socket.gethostname() else f" on {words[1]}")

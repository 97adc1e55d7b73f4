"""Write files so that no short write passes for a whole one, and an error of writing names its file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError of the ``with`` block name the file ``path`` if it names none.

    The system call ``open`` raises errors with the name of the file; ``write`` and ``fsync`` have the descriptor only.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


class _NamedFile(io.FileIO):
    """A new file without a buffer. The errors of its writes name it."""

    def write(self, data: Any) -> int:
        with naming(self.name):
            return super().write(data)


def open_to_write(path: Path) -> io.BufferedWriter:
    """Create or empty a file, as ``open(path, "wb")`` does. Errors of its writes name it, also those of its buffer."""
    return io.BufferedWriter(_NamedFile(os.fspath(path), "wb"))


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8. Unlike that of ``path.write_text``, an error of this function names the file."""
    with open_to_write(path) as file:
        file.write(text.encode())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes at the current position of an open file.

    A single ``os.write`` writes a part, without an error, if the disk has room for a part only.
    """
    while data:
        data = data[os.write(descriptor, data) :]

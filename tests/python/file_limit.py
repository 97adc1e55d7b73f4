"""Limit the size of files, which acts like a full disk: writes are short, then fail with "File too large"."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond a number of bytes in the ``with`` block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

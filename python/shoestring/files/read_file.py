"""Read untrusted files: regular files of limited size, and JSON that cannot exhaust stack or memory."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from shoestring.core.errors import HIDDEN, InputError

MAX_JSON = 16_000_000  # maximum size of a JSON file in bytes; a file has about 200 bytes per tensor or layer
MAX_VALUES = 1_000_000  # maximum number of commas and opening brackets in a JSON text


def check_regular(path: str | os.PathLike[str], where: str) -> int:
    """Return the size of a regular file in bytes. The file is not opened, since it may be a pipe or device.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: path is not a regular file, or the system denies access to it.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{where}: expected a regular file, received a folder, a pipe or a device")
    return status.st_size


def read_regular(path: Path, where: str, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file.
        where: the beginning of error messages.
        most: maximum size of the file in bytes; None is no limit.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: path is not a regular file, is larger than ``most``, or cannot be read.
    """
    size = check_regular(path, where)
    if most is not None and size > most:
        raise InputError(f"{where}: expected at most {most} bytes, received {size}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None


def parse_json(text: bytes, where: str) -> Any:
    """Parse a JSON text in UTF-8; ``where`` is the beginning of error messages.

    Raises:
        InputError: the text is not valid JSON, is nested too deeply, or has too many values.
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise InputError(f"{where}: expected JSON of at most {MAX_VALUES} values, received more")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            "too many objects and lists in each other" if isinstance(error, RecursionError) else str(error)
        )
        raise InputError(f"{where}: not valid JSON ({reason})") from None


def read_json(path: Path, where: str) -> Any:
    """Parse a JSON file; raise the same errors as :func:`read_regular` and :func:`parse_json`."""
    return parse_json(read_regular(path, where, MAX_JSON), where)


def is_integer(value: object) -> bool:
    """Return whether a JSON value is an integer of at most 64 bits. A boolean is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> bool:
    """Return whether a JSON value is an integer of at most 64 bits or a finite float."""
    return is_integer(value) or (isinstance(value, float) and abs(value) < float("inf"))


def is_name(value: object) -> bool:
    """Return whether a value can be a module's name and can be shown in an error message.

    Such a name is text of at most 1000 characters, which a terminal shows and does not act on.
    """
    return isinstance(value, str) and len(value) <= 1000 and HIDDEN.search(value) is None


def shown(value: object) -> str:
    """Return repr(value) for an error message, cut after 120 characters."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."

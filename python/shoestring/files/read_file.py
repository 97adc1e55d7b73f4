"""Files from elsewhere: regular ones, of limited size, and JSON that cannot exhaust stack or memory."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError

MAX_JSON = 16_000_000  # bytes; a real file has 200 for each tensor or layer
MAX_VALUES = 1_000_000  # commas and brackets


def check_regular(path: str | os.PathLike[str], where: str) -> int:
    """Return the size of a regular file; a named pipe or a device is refused without waiting for it.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is no regular file, or the system refuses to look at it.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{where}: expected a regular file, received a folder, a pipe or a device")
    return found.st_size


def read_regular(path: Path, where: str, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        where: begins the message of an error.
        most: the largest size, in bytes; None is any.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is no regular file, larger than ``most``, or the system refuses to read it.
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
    """Return what JSON in UTF-8 holds.

    Raises:
        InputError: it is no JSON, too deep or too large.
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
    """Return what a JSON file holds; raises as :func:`read_regular` and :func:`parse_json`."""
    return parse_json(read_regular(path, where, MAX_JSON), where)


def is_integer(value: object) -> bool:
    """True for JSON's integer of 64 bits; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> bool:
    """True for an integer of 64 bits or a finite float."""
    return is_integer(value) or (isinstance(value, float) and abs(value) < float("inf"))


def is_name(value: object) -> bool:
    """True for text that may name a module, and that a message may show: without control characters, not long."""
    return isinstance(value, str) and len(value) <= 1000 and (value.isprintable() or all(map(_plain, value)))


def _plain(letter: str) -> bool:
    return (
        letter >= " "
        and letter != "\x7f"
        and not "\ud800" <= letter <= "\udfff"
        and letter not in "\x85\u2028\u2029"
    )


def shown(value: object) -> str:
    """A value from a file in a message: one line, cut."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."

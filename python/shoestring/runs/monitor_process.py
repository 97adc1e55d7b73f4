"""Measure another process. This module needs no PyTorch, so that a monitor starts at once and takes little memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.runs.monitor_report import MonitorReport

LIBRARY = Path(__file__).parents[1] / "lib" / "libshoestring_monitor.so"


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise InputError(
            f"the libraries are not built ({error}); run `pip install --no-build-isolation .` in shoestring's source "
            "folder"
        ) from None
    handle, text = ctypes.c_void_p, ctypes.c_void_p
    library.shoestring_monitor_free.argtypes = [text]
    library.shoestring_monitor_check.argtypes = [ctypes.c_double]
    library.shoestring_monitor_check.restype = text
    library.shoestring_monitor_start.argtypes = [ctypes.c_int, ctypes.c_double]
    library.shoestring_monitor_start.restype = handle
    library.shoestring_monitor_report.argtypes = [handle]
    library.shoestring_monitor_report.restype = text
    library.shoestring_monitor_recent.argtypes = [handle, ctypes.c_double]
    library.shoestring_monitor_recent.restype = text
    library.shoestring_monitor_delete.argtypes = [handle]
    library.shoestring_monitor_judge.argtypes = [ctypes.c_char_p]
    library.shoestring_monitor_judge.restype = text
    return library


def _take(address: int) -> str:
    """Return a text of the library, and free it."""
    value = ctypes.cast(address, ctypes.c_char_p).value or b""
    _library().shoestring_monitor_free(address)
    return value.decode(errors="replace")


def check_interval(interval: float) -> None:
    """Raise InputError if an interval cannot be used."""
    error = _take(_library().shoestring_monitor_check(interval))
    if error:
        raise InputError(f"--{error}")


def judge(machine: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> MonitorReport:
    """Return the report of a machine and of samples, whose keys are those of a report.

    A key that is missing stands for the default of the C++ struct.

    Raises:
        ValueError: a value has another type.
    """
    text = json.dumps({"machine": dict(machine), "samples": [dict(sample) for sample in samples]})
    answer = _take(_library().shoestring_monitor_judge(text.encode()))
    if answer.startswith("\n"):
        raise ValueError(f"monitor: {answer[1:]}")
    return MonitorReport._of(answer)


class ProcessMonitor:
    """Measure a process and its descendants on a thread, until ``close``."""

    def __init__(self, pid: int, interval: float) -> None:
        check_interval(interval)
        self._handle = _library().shoestring_monitor_start(pid, interval)

    def report(self) -> MonitorReport:
        """Return what has been measured so far."""
        return MonitorReport._of(_take(_library().shoestring_monitor_report(self._handle)))

    def recent(self, seconds: float) -> MonitorReport:
        """Return the report of the last seconds, with one sample."""
        return MonitorReport._of(_take(_library().shoestring_monitor_recent(self._handle, seconds)))

    def close(self) -> None:
        """End the thread."""
        if self._handle is not None:
            _library().shoestring_monitor_delete(self._handle)
        self._handle = None

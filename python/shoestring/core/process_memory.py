"""Read the memory of this process, and what the machine still has for it."""

from __future__ import annotations

import resource
import sys

import torch


def _status(key: str) -> int | None:
    """Return the bytes that /proc/self/status has for a key, or None if there are none."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_bytes() -> int:
    """Return the high-water mark of the resident set of this process, in bytes."""
    peak = _status("VmHWM:")
    if peak is None:  # ru_maxrss is in bytes on macOS and in KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def resident_bytes() -> int:
    """Return the resident set size in bytes, or its peak if the system does not report the current value."""
    return _status("VmRSS:") or peak_bytes()


def reset_peak() -> bool:
    """Set the high-water mark to the resident set. Return whether the system allows it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def return_freed() -> None:
    """Return the memory of freed CPU tensors to the system, as far as an allocator still holds it."""
    torch.ops.shoestring._host_allocator_empty_cache()


def spare_bytes() -> tuple[int, int]:
    """Return the bytes of memory of the machine, and those that this process can still use without swapping.

    Both are limited by the control groups of the process.
    """
    total, available = torch.ops.shoestring._spare_memory()
    return total, available

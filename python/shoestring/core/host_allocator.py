"""The allocator of CPU tensors for training: reuses freed memory, in huge pages, and counts peaks."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch


class HostAllocatorStats(NamedTuple):
    """Bytes and counts of the CPU tensors that the allocator of :func:`host_allocator` made.

    Attributes:
        allocated: bytes of the tensors' storages now.
        peak_allocated: the maximum of ``allocated`` since the start, or since ``reset_peaks()``. It is exact.
        held: bytes that the process holds for storages: the storages, free memory that is kept for reuse, and
            rounding.
        peak_held: the maximum of ``held`` since the start, or since ``reset_peaks()``.
        allocations: allocations so far.
        taken: bytes of huge pages that were taken from the system so far.
        returned: bytes of huge pages that were returned to the system so far.

    Example:
        >>> import torch, shoestring
        >>> with shoestring.host_allocator() as allocator:
        ...     x = torch.empty(1000, 1000)
        ...     stats = allocator.stats()
        >>> stats.held >= stats.allocated >= 4_000_000
        True
    """

    allocated: int
    peak_allocated: int
    held: int
    peak_held: int
    allocations: int
    taken: int
    returned: int


class HostAllocator:
    """The handle that :func:`host_allocator` returns. All handles control the one allocator of the process.

    As a context manager, a handle switches the allocator off at the end of the ``with`` block, if the call
    that made the handle switched it on.

    Example:
        >>> import torch, shoestring
        >>> allocator = shoestring.host_allocator()
        >>> x = torch.empty(1000, 1000)
        >>> del x
        >>> freed = allocator.empty_cache()
        >>> allocator.disable()
        >>> allocator.enabled
        False
    """

    def __init__(self, switched_on: bool) -> None:
        self._switched_on = switched_on

    @property
    def enabled(self) -> bool:
        """Whether new CPU tensors come from this allocator."""
        return bool(torch.ops.shoestring._host_allocator_is_enabled())

    def disable(self) -> None:
        """Reinstall the allocator that was in use before, and return free memory to the system.

        Tensors of this allocator stay valid. Their memory is freed when they are deleted.
        """
        torch.ops.shoestring._host_allocator_disable()

    def stats(self) -> HostAllocatorStats:
        """Return bytes and counts."""
        return HostAllocatorStats(*torch.ops.shoestring._host_allocator_stats())

    def reset_peaks(self) -> None:
        """Start ``peak_allocated`` and ``peak_held`` again at the present values."""
        torch.ops.shoestring._host_allocator_reset_peaks()

    def empty_cache(self) -> int:
        """Return free memory to the system, also that of the C library.

        Returns:
            The number of bytes of huge pages that were returned.
        """
        return int(torch.ops.shoestring._host_allocator_empty_cache())

    def __enter__(self) -> HostAllocator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._switched_on:
            self.disable()


def host_allocator(*, limit: int | None = None, enable: bool = True) -> HostAllocator:
    """Use an allocator for training as the allocator of CPU tensors, in all threads, from now on.

    The allocator of the C library gives the memory of large tensors back to the system when they are deleted,
    and each step then pays for page faults, or it keeps far more memory than the tensors need. This allocator
    keeps freed memory for reuse, in huge pages. It holds at most one huge page (2 MiB) more than the most
    bytes that tensors have needed so far, unless all free gaps are smaller than a huge page. It returns
    free memory while the system, or the control group of the process, is short of memory.

    Tensors that exist stay valid when the allocator is switched on or off. Forked processes, such as the
    workers of a ``DataLoader``, inherit the allocator. Pinned memory and shared memory have other allocators.

    Args:
        limit: the most bytes that CPU tensors of this allocator may hold. An allocation beyond it raises
            ``torch.OutOfMemoryError``. By default the system decides. A later call replaces the limit.
        enable: False only returns a handle, for statistics or to switch the allocator off; ``limit`` is then
            refused.

    Returns:
        A handle with the statistics.

    Raises:
        ValueError: ``limit`` is not positive, or is given with ``enable=False``.
        RuntimeError: an allocator with a priority above 0 is installed.

    Example:
        >>> import torch, shoestring
        >>> with shoestring.host_allocator() as allocator:
        ...     before = allocator.stats().allocated
        ...     x = torch.empty(1000, 1000)
        ...     print(allocator.stats().allocated - before)
        4000000
        >>> allocator.enabled
        False
    """
    if limit is not None and (not enable or limit <= 0):
        expected = "a positive number of bytes" if enable else "None with enable=False"
        raise ValueError(f"host_allocator: limit: expected {expected}, got {limit}")
    before = HostAllocator(False)
    if not enable:
        return before
    was_enabled = before.enabled
    torch.ops.shoestring._host_allocator_enable(limit)
    return HostAllocator(not was_enabled)

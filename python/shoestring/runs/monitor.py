"""Measure a training run from inside, and name its bottleneck."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from shoestring import _load
from shoestring.runs.monitor_report import MonitorReport

_load.load()

Batch = TypeVar("Batch")


class Monitor:
    """Measure this process and its children, and name the bottleneck of the run.

    A thread in C++ samples processor time, memory, swapping, page faults and disks from /proc, and GPUs from NVML if
    the driver is installed. The memory of the process and of its children, such as DataLoader workers, counts shared
    pages once. Peaks between two samples count, as far as the system and PyTorch's allocator keep them. The loop
    measures how long it waits for data: on the CPU, the time in ``next``; on a device, the time of that in which the
    device has no work.

    One monitor follows one loop, on one thread. In a forked child, it measures nothing.

    Args:
        interval: seconds between two samples, from 0.1 to 10.
        device: the device whose idle time and memory are measured. None stands for the current device of the
            accelerator if this process has used it before, otherwise for the CPU.

    Raises:
        ValueError: the interval is out of range, or this PyTorch does not have the device.

    Example:
        >>> monitor = shoestring.Monitor()
        >>> loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16)
        >>> for batch in monitor.watch(loader):
        ...     loss = batch.square().mean()
        >>> report = monitor.stop()  # print(report) shows a table
        >>> int(report.total["steps"]), report.machine["workers"]
        (4, 0)
    """

    def __init__(self, interval: float = 0.5, *, device: torch.device | str | None = None) -> None:
        resolved = None if device is None else torch.device(device)
        self._core: Any = torch.classes.shoestring.Monitor(float(interval), resolved)
        self._last: MonitorReport | None = None

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and measure how long the loop waits for each of them.

        The time between two waits is a step, unless the loop calls :meth:`step`.

        Args:
            batches: a DataLoader, a Prefetcher or any other iterable.
        """
        workers = getattr(batches, "num_workers", None)
        if isinstance(workers, int):
            self._core.set_workers(workers)
        core = self._core
        core.begin_wait()
        try:
            for batch in batches:
                core.end_wait()
                yield batch
                del batch  # the loop alone decides how long its batch lives
                core.begin_wait()
            core.end_wait()
        finally:
            core.end_loop()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Measure a wait for data of a loop that does not use :meth:`watch`."""
        self._core.begin_wait()
        try:
            yield
        finally:
            self._core.end_wait()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step."""
        self._core.begin_step()
        try:
            yield
        finally:
            self._core.end_step()

    def report(self) -> MonitorReport:
        """Return what has been measured so far."""
        return self._last if self._last is not None else MonitorReport._of(self._core.report())

    def stop(self) -> MonitorReport:
        """Stop measuring, and return the report. The loop may go on; nothing is measured any more."""
        if self._last is None:
            self._last = MonitorReport._of(self._core.stop())
        return self._last

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

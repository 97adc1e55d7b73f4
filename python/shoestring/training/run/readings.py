"""Loss and gradient norm of each step, kept on the device and read some steps later."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Readings:
    """Collect losses and gradient norms on the device, and read those of several steps at once.

    The steps between two reads form an interval. At its end, the values are copied to pinned host memory
    without waiting. They are read when the next interval has ended: then the copy has long finished, and the
    device has work enqueued. On the CPU, an interval is read at its own end.

    ``bad`` is an fp32 element on the device: 0, or 1 from the first step with a loss or a norm that is not
    finite. An optimizer that takes ``bad`` as its ``found_inf`` skips all steps from this one on, without a
    word from the host.

    Args:
        device: the device of the losses.
        interval: number of steps between reads.
        micro_batches: number of losses of a step.
        total: function that adds losses up over the processes of the run.
        norm_must_be_finite: whether ``bad`` also reacts to the norm. Under loss scaling, a norm that is not
            finite is normal.
    """

    def __init__(
        self,
        device: torch.device,
        interval: int,
        micro_batches: int,
        norm_must_be_finite: bool = True,
        total: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        shape = (interval, micro_batches + 1)
        self._device = device
        self._late = device.type != "cpu"
        self._norm_must_be_finite = norm_must_be_finite
        self._total = total
        # Two buffers: one collects an interval while the other waits to be read.
        self._values = [torch.zeros(shape, device=device) for _ in range(2)]
        self._host = [torch.zeros(shape, pin_memory=self._late) for _ in range(2)]
        self._copied = [torch.Event(device) for _ in range(2)] if self._late else []
        self._waiting: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._current = 0
        self._began = time.perf_counter()
        self.bad = torch.zeros((), device=device)

    @property
    def is_full(self) -> bool:
        """Whether the interval has as many steps as fit into it."""
        return len(self._rows) == len(self._values[0])

    @property
    def is_full_after_next(self) -> bool:
        """Whether the next step ends the interval."""
        return len(self._rows) + 1 == len(self._values[0])

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, a scalar on the device."""
        self._losses.append(loss.detach().float())

    def drop_step(self) -> None:
        """Forget the losses of a step that failed."""
        self._losses.clear()

    def add_norm(self, norm: Tensor) -> None:
        """End the losses of a step with its gradient norm, and update ``bad``, before the optimizer steps.

        The norm of an optimizer that steps on the host (``--offload cpu``) is a tensor of the CPU.
        """
        norm = norm.detach().to(self.bad.device, torch.float32, non_blocking=True)
        values = torch.stack([*self._total(torch.stack(self._losses)), norm])
        self._losses.clear()
        self._values[self._current][len(self._rows)].copy_(values)
        checked = values if self._norm_must_be_finite else values[:-1]
        self.bad.copy_(torch.maximum(self.bad, (~checked.isfinite()).any().float()))

    def end_step(self, row: dict[str, Any]) -> None:
        """End a step. ``row`` has its other figures; ``loss``, ``grad_norm`` and ``seconds`` will be added."""
        self._rows.append(row)

    def end_interval(self, wait: bool) -> list[dict[str, Any]]:
        """End an interval, and return the rows of the interval before, or with ``wait`` all rows.

        ``seconds`` of a row is the mean over the steps of its interval.
        """
        now = time.perf_counter()
        for row in self._rows:
            row["seconds"] = (now - self._began) / len(self._rows)
            row["tokens_per_second"] = row["tokens"] / row["seconds"]
        self._began = now
        self._host[self._current].copy_(self._values[self._current], non_blocking=True)
        if self._late:
            self._copied[self._current].record(torch.accelerator.current_stream(self._device))
        previous_rows, self._waiting, self._rows = self._waiting, self._rows, []
        self._current = 1 - self._current
        rows_read = self._read(previous_rows, self._current)
        if wait or not self._late:
            rows_read += self._read(self._waiting, 1 - self._current)
            self._waiting = []
        return rows_read

    def restart_clock(self) -> None:
        """Leave the time since the last interval, such as that of an evaluation, out of the next interval."""
        self._began = time.perf_counter()

    def _read(self, rows: list[dict[str, Any]], buffer: int) -> list[dict[str, Any]]:
        """Wait for the values of an interval, and write losses and gradient norms into its rows."""
        if rows and self._late:
            self._copied[buffer].synchronize()
        for row, values in zip(rows, self._host[buffer].tolist()):
            row["loss"], row["grad_norm"] = functools.reduce(operator.add, values[:-1]), values[-1]
        return rows

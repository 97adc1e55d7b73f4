"""The report of a monitor. This module needs no PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.files.write_file import naming

GIB = 1024**3


@dataclass(frozen=True)
class MonitorFinding:
    """A bottleneck.

    Attributes:
        resource: "data", "memory", "cpu", "disk" or "gpu".
        share: the share of the time that the bottleneck takes or puts at risk, from 0 to 1.
        evidence: what was measured, with numbers.
        cure: what to do, in one line.

    Example:
        >>> monitor = shoestring.Monitor()
        >>> lines = [f"{each.resource}: {each.evidence}. {each.cure}" for each in monitor.stop().findings]
    """

    resource: str
    share: float
    evidence: str
    cure: str


@dataclass(frozen=True)
class MonitorReport:
    """The measurements of a :class:`Monitor`. ``str()`` returns a table.

    The keys of ``machine``, ``total`` and ``samples`` are the members of the C++ structs ``MonitorMachine`` and
    ``MonitorSample``, which describe them.

    Attributes:
        findings: the bottlenecks, the largest share first. Empty if the run is bound by computing.
        machine: cores and memory that the process may use, and the GPUs.
        total: the whole time: sums of times and counts, and the highest of all peaks.
        samples: the intervals in their order. A long run has longer intervals, so that there are at most 4,096.

    Example:
        >>> report = shoestring.Monitor().stop()
        >>> report.total["seconds"] > 0, str(report).startswith("time"), report.to_json()[:13]
        (True, True, '{"findings":[')
    """

    findings: list[MonitorFinding]
    machine: dict[str, Any]
    total: dict[str, Any]
    samples: list[dict[str, Any]] = field(repr=False)
    _texts: tuple[str, str] = field(repr=False, compare=False)

    @classmethod
    def _of(cls, text: str) -> MonitorReport:
        """Make a report of what C++ returns: its JSON in one line, and its table."""
        line, _, table = text.partition("\n")
        values = json.loads(line)
        findings = [MonitorFinding(**each) for each in values["findings"]]
        return cls(findings, values["machine"], values["total"], values["samples"], (line, table))

    def __str__(self) -> str:
        return self._texts[1].rstrip("\n")

    def to_json(self) -> str:
        """Return the report as a JSON object in one line, as C++ ``MonitorReport::json`` does."""
        return self._texts[0]

    def plot(self, path: str | Path) -> None:
        """Draw the measurements over time into an image file, whose format follows from the name.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not know the format.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "MonitorReport.plot: expected matplotlib, which is not installed. Run `pip install matplotlib`."
            ) from None
        panels = self._panels()
        figure = Figure(figsize=(9, 2.1 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        times = [sample["time"] for sample in self.samples]
        for axis, (title, limit, lines) in zip(axes, panels, strict=True):
            for name, values in lines.items():
                axis.plot(times, values, label=name, linewidth=1.2)
            if limit:
                axis.axhline(limit, color="grey", linestyle=":", linewidth=1)
            axis.set_ylabel(title)
            axis.set_ylim(bottom=0)
            axis.legend(loc="upper left", fontsize="small", frameon=False)
        axes[-1].set_xlabel("seconds")
        with naming(path):
            figure.savefig(path)

    def _panels(self) -> list[tuple[str, float, dict[str, list[float]]]]:
        """Return for each panel its title, a limit or 0, and its lines by name."""

        def rate(name: str, unit: float = 1.0) -> list[float]:
            return [sample[name] / max(sample["seconds"], 1e-9) / unit for sample in self.samples]

        def peak(name: str) -> list[float]:
            return [sample[name] / GIB for sample in self.samples]

        def gpu(number: int, name: str) -> list[float]:
            return [
                sample["gpus"][number][name] if number < len(sample["gpus"]) else 0.0
                for sample in self.samples
            ]

        seconds = [max(sample["seconds"], 1e-9) for sample in self.samples]
        panels: list[tuple[str, float, dict[str, list[float]]]] = [
            (
                "cores",
                self.machine["cores"],
                {"this run": rate("cpu_seconds"), "machine": rate("machine_cpu_seconds")},
            ),
            (
                "memory, GiB",
                self.machine["memory"] / GIB,
                {"this run": peak("memory_peak"), "machine": peak("machine_memory_peak")},
            ),
            ("disk, MB/s", 0, {"read": rate("read_bytes", 1e6), "written": rate("written_bytes", 1e6)}),
        ]
        if self.total["steps"]:
            loop = [max(s["wait_seconds"] + s["step_seconds"], 1e-9) for s in self.samples]
            waits = [100 * s["wait_seconds"] / all_ for s, all_ in zip(self.samples, loop, strict=True)]
            panels.append(("loop, %", 100, {"waiting for data": waits}))
        numbers = range(len(self.machine["gpu_names"]))
        if numbers:
            busy = {
                f"GPU {i}": [100 * b / s for b, s in zip(gpu(i, "busy_seconds"), seconds, strict=True)]
                for i in numbers
            }
            panels.append(("GPU busy, %", 100, busy))
            memory = {f"GPU {i}": [value / GIB for value in gpu(i, "memory_peak")] for i in numbers}
            panels.append(("GPU memory, GiB", max(self.machine["gpu_memory"]) / GIB, memory))
        return panels

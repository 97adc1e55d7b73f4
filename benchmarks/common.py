"""Timing that survives a drifting machine: every candidate in turn, many times, and medians of ratios."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Candidates = dict[str, Callable[[], object]]


def arguments(description: str) -> argparse.Namespace:
    """The options that every benchmark has; sets the number of threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which each candidate runs once")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def interleave(candidates: Candidates, repeats: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


class Report:
    """Prints a table a title, and keeps the figures for the JSON file."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        capability = torch.ops.shoestring.cpu_capability()
        self.data = {
            "benchmark": name,
            "machine": f"{cpu_model()}, {options.threads} threads, {capability} kernels",
            "torch": torch.__version__,
            "tables": [],
        }
        print(f"{name}: {self.data['machine']}, PyTorch {torch.__version__}")

    def table(self, title: str, times: dict[str, list[float]], work: float, unit: str) -> None:
        """work / seconds gives the rate in `unit`; ratios are to the first candidate, round by round."""
        print(f"\n{title}\n  {'':36} {'ms':>9} {unit:>12} {'times ours':>11}")
        ours = next(iter(times.values()))
        rows = []
        for name, seconds in times.items():
            ratio = statistics.median(t / o for t, o in zip(seconds, ours))
            median = statistics.median(seconds)
            rows.append({"name": name, "seconds": median, "rate": work / median, "ratio": ratio})
            print(f"  {name:36} {median * 1e3:9.2f} {work / median:12.2f} {ratio:11.2f}")
        self.data["tables"].append({"title": title, "unit": unit, "rows": rows})

    def finish(self) -> None:
        if self.options.json:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(self.data, indent=1) + "\n")

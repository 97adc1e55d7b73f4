"""Time whole training steps: eager PyTorch, torch.compile, PEFT with bitsandbytes, and shoestring.

Each candidate runs in a process of its own. The processes take turns, in a random order in each round, so
that all candidates meet the same state of the machine. "of ceiling" is the time of all matrix products of the
step, each timed alone with the faster of PyTorch's and our implementations, divided by the time of the step.
A step is forward, backward, the optimizer's step and zero_grad; "peak" is the high-water mark (VmHWM) of the
process during the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shoestring  # noqa: F401  (registers the operators that Report asks for)
from benchmarks.common import Report, arguments
from benchmarks.random_llama import SIZES, write_random_llama
from benchmarks.step.cases import CASES, QLORA, Case
from benchmarks.step.cpp import compare_cpp
from benchmarks.step.losses import compare_losses
from benchmarks.step.worker import MIB, Failed, Worker

CEILING = "ceiling"
QUICK = ["llama-amp", "resnet-fp32"]  # the cases of --quick


def more_arguments(parser: argparse.ArgumentParser) -> None:
    names = sorted({name for case in CASES.values() for name in case.candidates})
    parser.add_argument("--only", nargs="+", metavar="CASE",
                        help=f"cases whose names contain one of these: {', '.join(CASES)}; with --quick by default two of them")  # fmt: skip
    parser.add_argument("--candidates", nargs="+", choices=[*names, CEILING], metavar="NAME",
                        help=f"{', '.join(names)}, {CEILING} (of the matrix products); by default all")  # fmt: skip
    parser.add_argument("--no-profile", action="store_true", help="do not print where the time goes")
    parser.add_argument("--products", action="store_true", help="print the rate of each matrix product")
    parser.add_argument("--losses", action="store_true",
                        help="instead compare the losses of 200 steps of small models with eager PyTorch's")  # fmt: skip
    parser.add_argument("--cpp", type=Path, metavar="PATH",
                        help="instead time the example train_gpt, built there, beside `shoestring train`")  # fmt: skip
    parser.add_argument("--model", type=Path, help="folder of the model of QLoRA; it is written if missing")


class Benchmark:
    """Times the candidates of each case, and prints the tables."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        # The losses of many steps are compared on smaller models.
        self.scale = "quick" if options.quick else "small" if options.losses else "full"
        self.report = Report("step", options)

    def start(self, case: str, candidate: str) -> Worker:
        options = {"scale": self.scale, "threads": self.options.threads}
        if CASES[case].family == "qlora":
            size = QLORA[self.scale][0]
            folder = self.folder / size
            if not (folder / "config.json").is_file():
                write_random_llama(folder, **SIZES[size])
            options["folder"] = str(folder)
        return Worker(case, candidate, options)

    def run(self, name: str) -> None:
        """Time the candidates of a case, and print its tables."""
        case = CASES[name]
        # With --quick, compiled candidates run only if they are named, because compilation takes minutes.
        usual = [c for c, way in case.candidates.items() if way.mode is None or not self.options.quick]
        wanted = self.options.candidates or [*usual, CEILING]
        candidates = [c for c in (*case.candidates, CEILING) if c in wanted]
        times: dict[str, list[float]] = {}
        memory: dict[str, dict[str, int]] = {}
        facts: dict[str, dict[str, Any]] = {}
        profiles: dict[str, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        groups = [[c] for c in candidates] if case.apart else [candidates]
        for group in groups:
            with contextlib.ExitStack() as stack:
                # Eager PyTorch shows the products, of which compilation would fuse some.
                workers = {c: self.start(name, "eager" if c == CEILING else c) for c in group}
                for c, worker in list(workers.items()):
                    stack.callback(worker.close)
                    try:
                        facts[c] = worker.ask("record" if c == CEILING else "prepare")
                    except Failed as error:
                        failed[c] = str(error)
                        del workers[c]
                times |= self.rounds(workers, failed)
                for c in times.keys() & workers.keys() - {CEILING}:
                    memory[c] = workers[c].ask("memory")
                if not self.options.no_profile:
                    profiles |= self.profile(case, {c: times[c] for c in times if c in workers}, workers)
        self.print_case(name, times, memory, facts, failed)
        self.print_profile(name, {c: profiles[c] for c in self.compared(case, times) if c in profiles})
        self.report.finish()

    def losses(self, name: str) -> None:
        print(f"\n{name}: {CASES[name].title(self.scale)}")
        if CASES[name].family == "qlora":
            print("  the weights differ from those of eager PyTorch, so the losses are not compared")
            return
        steps = 20 if self.options.quick else 200
        rows = compare_losses(lambda candidate: self.start(name, candidate), steps)
        self.keep(f"{name}: losses of {steps} steps, largest relative difference from eager PyTorch's", rows)
        self.report.finish()

    def cpp(self) -> None:
        options = self.options
        rows = [
            compare_cpp(options.cpp, precision, options.quick, min(options.repeats, 3), options.threads)
            for precision in ("fp32", "bf16")
        ]
        self.keep("train_gpt (C++) and shoestring train (Python)", rows)
        self.report.finish()

    def rounds(self, workers: dict[str, Worker], failed: dict[str, str]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {c: [] for c in workers}
        order = random.Random(0)
        for _ in range(self.options.repeats):
            for c in order.sample(list(times), len(times)):
                try:
                    times[c].append(workers[c].ask("products" if c == CEILING else "time"))
                except Failed as error:
                    failed[c] = str(error)
                    del times[c]
        return times

    def print_case(
        self,
        name: str,
        times: dict[str, list[float]],
        memory: dict[str, dict[str, int]],
        facts: dict[str, dict[str, Any]],
        failed: dict[str, str],
    ) -> None:
        case = CASES[name]
        ceiling = times.pop(CEILING, None)
        found = facts.get(CEILING)
        columns = {}
        for c, seconds in times.items():
            peak, imports = memory[c]["peak"], memory[c]["imports"]
            columns[case.candidates[c].label] = {
                "peak MiB": peak / MIB,
                "above imports": (peak - imports) / MIB,
                "of ceiling": statistics.median(a / b for a, b in zip(ceiling, seconds)) if ceiling else None,
            }
        title = f"{name}: {case.title(self.scale)}"
        if times:
            labelled = {case.candidates[c].label: seconds for c, seconds in times.items()}
            self.report.table(title, labelled, case.items(self.scale), case.unit, columns)
        if ceiling and found:
            seconds = statistics.median(ceiling)
            chosen = ", ".join(f"{way} {count:g}" for way, count in found["chosen"].items())
            print(f"  {found['count']:g} products of {found['flops'] / 1e9:.0f} GFLOP alone, the ceiling: "
                  f"{seconds * 1e3:.1f} ms, {found['flops'] / seconds / 1e9:.0f} GFLOP/s; fastest: {chosen}")  # fmt: skip
            self.keep(f"{name}: matrix products", found["rows"])
            if self.options.products:
                for row in sorted(found["rows"], key=lambda row: -row["seconds"]):
                    rates = ", ".join(f"{way} {rate:.0f}" for way, rate in row["GFLOP/s"].items())
                    print(f"    {row['seconds'] * 1e3:8.2f} ms  {row['count']:5g} x {row['name']}: {rates} GFLOP/s")  # fmt: skip
        for c in times:
            for note in facts[c]["notes"]:
                print(f"  {case.candidates[c].label}: {note}")
        for c, reason in failed.items():
            print(f"  {case.candidates[c].label if c != CEILING else CEILING} failed: {reason}")
        self.keep(f"{name}: failed", [{"name": c, "reason": reason} for c, reason in failed.items()])
        self.compare(case, times)

    def compare(self, case: Case, times: dict[str, list[float]]) -> None:
        """Print how the faster of our candidates compares with the fastest peer."""
        medians = {c: statistics.median(seconds) for c, seconds in times.items()}
        ours = {c: t for c, t in medians.items() if case.candidates[c].ours}
        peers = {c: t for c, t in medians.items() if not case.candidates[c].ours}
        if ours and peers:
            best, peer = min(ours, key=lambda c: ours[c]), min(peers, key=lambda c: peers[c])
            ratio = statistics.median(p / o for p, o in zip(times[peer], times[best]))
            print(f"  {best} is {ratio:.2f} times as fast as the fastest peer, {peer}")

    def profile(
        self, case: Case, times: dict[str, list[float]], workers: dict[str, Worker]
    ) -> dict[str, dict[str, Any]]:
        """Return where the time goes in shoestring's step and in the step of the fastest peer."""
        found = {}
        for c in self.compared(case, times):
            try:
                found[c] = workers[c].ask("profile", steps=1 if self.options.quick or case.apart else 2)
            except Failed as error:
                print(f"  no profile of {case.candidates[c].label}: {error}")
        return found

    def compared(self, case: Case, times: dict[str, list[float]]) -> list[str]:
        """Return the names of shoestring's step and of the step of the fastest peer."""
        medians = {c: statistics.median(seconds) for c, seconds in times.items() if c != CEILING}
        peers = [c for c in medians if not case.candidates[c].ours]
        return [c for c in ("ours",) if c in medians] + sorted(peers, key=lambda c: medians[c])[:1]

    def print_profile(self, name: str, found: dict[str, dict[str, Any]]) -> None:
        if not found:
            return
        print(f"\n  {'where the time goes, ms per step':44}" + "".join(f"{c:>24}" for c in found))
        rows: list[dict[str, Any]] = []
        for group in next(iter(found.values()))["seconds"]:
            rows.append({"name": group, **{c: f["seconds"][group] * 1e3 for c, f in found.items()}})
        rows.append({"name": "step under the profiler", **{c: f["profiled step"] * 1e3 for c, f in found.items()}})  # fmt: skip
        rows.append({"name": "step", **{c: f["step"] * 1e3 for c, f in found.items()}})
        rows.append({"name": "time of the system, in all of these", **{c: f["system seconds"] * 1e3 for c, f in found.items()}})  # fmt: skip
        rows.append({"name": "page faults", **{c: f["page faults"] for c, f in found.items()}})
        for row in rows:
            print(f"  {row['name']:44}" + "".join(f"{row[c]:24.1f}" for c in found))
        for c, f in found.items():
            print(f"  {c}: " + ", ".join(f"{op} {s * 1e3:.1f}" for op, s in f["operators"].items()))
        self.keep(f"{name}: where the time goes, ms per step", rows)

    def keep(self, title: str, rows: list[dict[str, Any]]) -> None:
        """Keep a table of other columns for the JSON file."""
        if rows:
            self.report.data["tables"].append({"title": title, "rows": rows})


@contextlib.contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    options = arguments(__doc__, more=more_arguments)
    only = options.only or (QUICK if options.quick else [""])
    names = [name for name in CASES if any(part in name for part in only)]
    if not names:
        raise SystemExit(f"bench_step: --only: expected a part of {', '.join(CASES)}, got {options.only}")
    with model_folder(options) as folder:
        benchmark = Benchmark(options, folder)
        if options.cpp is not None:
            benchmark.cpp()
            return
        for name in names:
            (benchmark.losses if options.losses else benchmark.run)(name)


if __name__ == "__main__":
    main()

"""Measure training steps on the CPU with several allocators of host memory: seconds, page faults, memory.

Each candidate is a process of its own that trains the same Llama. The processes take turns step by step, so that
all meet the same state of the machine. Candidates:

- glibc: PyTorch's allocator on the C library's, as it is by default.
- MALLOC_MMAP_THRESHOLD_: the same, with every block of 128 KiB or more from the system, and back to it.
- jemalloc, tcmalloc: preloaded, if they are installed or given with --preload.
- shoestring: shoestring.host_allocator().

"peak" is by how much the process grew (VmHWM) above its memory after a step of a tiny model, which loads all
libraries. The peak of the tensors is exact; it is the least that the process must grow by. The case "turns" has
batches of several shapes in turn, as fine-tuning has.
"""

import argparse
import ctypes.util
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import shoestring
from benchmarks.common import Report, arguments

SHAPES = {"fixed": [(4, 512)], "turns": [(4, 512), (3, 333), (8, 200), (2, 512), (5, 401), (1, 512)]}
PRECISIONS = ("fp32", "bf16")
MODELS = ("eager", "patched")
CASES = [f"{model} {precision} {shapes}" for model in MODELS for precision in PRECISIONS for shapes in SHAPES]
DEMO = "demo"  # the shape of `shoestring demo`


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def trainer(hidden: int, layers: int, vocabulary: int, patched: bool, bf16: bool) -> Callable[..., None]:
    """Return a function that trains a Llama for one step on a random batch of a given shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64), tie_word_embeddings=False, max_position_embeddings=512,
        )
    )  # fmt: skip
    optimizer: torch.optim.Optimizer
    if patched:
        shoestring.patch(model)
        optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(rows: int, tokens: int) -> None:
        x = torch.randint(vocabulary, (rows, tokens))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def child(case: str, ours: bool, threads: int, quick: bool) -> None:
    """Do one step for each line of stdin; print seconds and page faults, and at the end the memory."""
    torch.set_num_threads(threads)
    kind, precision, shapes = case.split() if case != DEMO else ("patched", "fp32", DEMO)
    allocator = shoestring.host_allocator(enable=ours)
    trainer(64, 1, 512, kind == "patched", precision == "bf16")(2, 64)
    start = status("VmRSS:")
    allocator.reset_peaks()
    size = (64, 1, 512) if quick else (128, 4, 16384) if case == DEMO else (512, 4, 16384)
    step = trainer(*size, kind == "patched", precision == "bf16")
    batches = [(16, 512)] if case == DEMO else SHAPES[shapes]
    number = 0
    for _ in sys.stdin:
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        for rows, tokens in batches:
            step(rows, tokens // (8 if quick else 1))
        seconds = time.perf_counter() - began
        number += len(batches)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        print(seconds / len(batches), faults / len(batches), flush=True)
    stats = allocator.stats()
    print(status("VmHWM:") - start, stats.peak_allocated, stats.peak_held, flush=True)


def candidates(preload: list[str]) -> dict[str, dict[str, str]]:
    """Return the environment of each candidate by name; ours comes first."""
    found: dict[str, dict[str, str]] = {
        "shoestring": {},
        "glibc": {},
        "MALLOC_MMAP_THRESHOLD_": {"MALLOC_MMAP_THRESHOLD_": "131072"},
    }
    installed = [path for path in map(ctypes.util.find_library, ("jemalloc", "tcmalloc_minimal")) if path]
    for library in preload or installed:
        found[os.path.basename(library).removeprefix("lib").split(".")[0]] = {"LD_PRELOAD": library}
    return found


class Child:
    """A process that does one round of steps at a time."""

    def __init__(
        self, name: str, case: str, environment: dict[str, str], options: argparse.Namespace
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.core.bench_host_allocator", "--child", case]
        command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
        command += ["--ours"] if name == "shoestring" else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def round(self) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, faults = self._read()
        return seconds, faults

    def end(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        memory = self._read()
        self.process.wait()
        return memory

    def _read(self) -> list[float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a candidate ended with exit code {self.process.wait()}")
        return [float(word) for word in line.split()]


def measure(
    case: str, environments: dict[str, dict[str, str]], options: argparse.Namespace, report: Report
) -> None:
    children = {name: Child(name, case, each, options) for name, each in environments.items()}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in children}
    # The first rounds load kernels and reach the peak of memory, so they are not counted.
    for number in range(options.repeats + 2):
        for name, each in children.items():
            found = each.round()
            if number >= 2:
                rounds[name].append(found)
    memory = {name: each.end() for name, each in children.items()}
    tensors, held = memory["shoestring"][1:]
    print(f"\n{case}: peak of tensors {tensors / 2**20:.0f} MiB, held for them {held / 2**20:.0f} MiB")
    print(
        f"  {'':24} {'ms/step':>9} {'faults/step':>12} {'peak MiB':>9} {'/ tensors':>10} {'times ours':>11}"
    )
    ours = [seconds for seconds, _ in rounds["shoestring"]]
    rows: list[dict[str, Any]] = []
    for name, each in rounds.items():
        seconds = statistics.median(s for s, _ in each)
        faults = statistics.median(f for _, f in each)
        ratio = statistics.median(s / o for (s, _), o in zip(each, ours, strict=True))
        grown = memory[name][0]
        rows.append({"name": name, "seconds": seconds, "faults": faults, "peak": grown, "ratio": ratio})
        print(
            f"  {name:24} {seconds * 1e3:9.1f} {faults:12.0f} {grown / 2**20:9.0f} {grown / tensors:10.3f} {ratio:11.2f}"
        )
    report.data["tables"].append({"title": case, "tensors": tensors, "held": held, "rows": rows})
    report.finish()


def reuse(report: Report) -> None:
    """Time the allocation of an empty tensor whose block was just freed."""
    rows = []
    print("\nallocate and free an empty tensor, microseconds")
    for size in (4096, 1 << 20, 64 << 20):
        times = {}
        for name, enable in (("shoestring", True), ("glibc", False)):
            shoestring.host_allocator(enable=enable)
            for _ in range(2):
                began = time.perf_counter()
                for _ in range(2_000):
                    torch.empty(size, dtype=torch.uint8)
                times[name] = (time.perf_counter() - began) / 2_000
            shoestring.host_allocator(enable=False).disable()
        rows.append({"bytes": size, **times})
        print(f"  {size:12,} bytes: " + ", ".join(f"{name} {t * 1e6:.2f}" for name, t in times.items()))
    report.data["tables"].append({"title": "reuse", "rows": rows})
    report.finish()


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--case", action="append", choices=[*CASES, DEMO], help="only this case; repeatable"
        )
        parser.add_argument("--preload", action="append", default=[], help="library to compare; repeatable")
        parser.add_argument("--child", help=argparse.SUPPRESS)
        parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)

    options = arguments(__doc__, more=more)
    if options.child:
        child(options.child, options.ours, options.threads, options.quick)
        return
    report = Report("host_allocator", options)
    reuse(report)
    for case in options.case or [*CASES, DEMO]:
        measure(case, candidates(options.preload), options, report)


if __name__ == "__main__":
    main()

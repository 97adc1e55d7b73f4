"""Time small operators with one thread and with all threads, when threads spin and when they sleep.

A speed-up is the time with one thread divided by the time with all threads. Below 1, the operator woke threads
for too little work. A process of its own is timed with each policy of OpenMP: "active", in which threads spin
between parallel regions, and "passive", in which they sleep. A size is the number of bytes of the input.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import shoestring
from benchmarks.common import Report, arguments

SIZES = tuple(1 << bits for bits in (14, 16, 18, 20, 22, 24))
WIDTH = 256
ROUND = 3e-3  # seconds that one call is repeated before it is the turn of the other number of threads


def make_operators(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls to time, on x of shape (rows, WIDTH)."""
    weight, target = torch.ones(WIDTH), torch.zeros(len(x), dtype=torch.long)
    seed, packed = torch.tensor(1), shoestring.quantize_4bit(x)
    parameter = torch.nn.Parameter(x.clone())
    parameter.grad = torch.ones_like(x)
    square, narrow = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, 32)
    out, out_narrow = torch.empty_like(x), torch.empty(len(x), 32)
    heads = x.view(-1, 16, 4, WIDTH // 4).transpose(1, 2)  # sequences of 16 tokens, 4 heads
    int8 = shoestring.quantize_int8(x)
    return {
        "rms_norm": lambda: shoestring.rms_norm(x, weight, eps=1e-6),
        "swiglu": lambda: shoestring.swiglu(x, x),
        "seeded_dropout": lambda: shoestring.seeded_dropout(x, 0.1, seed=seed),
        "cross_entropy": lambda: shoestring.cross_entropy(x, target),
        "quantize_4bit": lambda: shoestring.quantize_4bit(x),
        "quantize_int8": lambda: shoestring.quantize_int8(x),
        "dequantize_4bit": packed.dequantize,
        "dequantize_int8": int8.dequantize,
        "foreach_norm": lambda: torch.ops.shoestring.foreach_norm([x]),
        "addmm_": lambda: torch.ops.shoestring.addmm_(out, x, square, beta=0),
        "addmm_, 32 columns": lambda: torch.ops.shoestring.addmm_(out_narrow, x, narrow, beta=0),
        "attention": lambda: shoestring.attention(heads, heads, heads, causal=True),
        "adamw_": shoestring.optim.AdamW([parameter], lr=1e-3).step,
    }


def seconds(call: Callable[[], object], threads: int) -> float:
    """Return the seconds per call, over about ROUND seconds."""
    torch.set_num_threads(threads)
    call()
    calls, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < ROUND or calls < 3:
        call()
        calls += 1
    return taken / calls


def measure(sizes: tuple[int, ...], threads: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return, for each operator, a row per size: the median microseconds and the median speed-up."""
    rows: dict[str, list[dict[str, float]]] = {}
    for size in sizes:
        x = torch.randn(size // 4 // WIDTH, WIDTH)
        with torch.no_grad():
            for name, call in make_operators(x).items():
                seconds(call, threads)
                pairs = [(seconds(call, 1), seconds(call, threads)) for _ in range(repeats)]
                rows.setdefault(name, []).append(
                    {
                        "size": size,
                        "us": 1e6 * statistics.median(all_ for _, all_ in pairs),
                        "speed-up": statistics.median(one / all_ for one, all_ in pairs),
                    }
                )
    return rows


def child_of(policy: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    command = [sys.executable, "-m", "benchmarks.core.bench_threads", "--child", "--threads", str(options.threads),
               "--repeats", str(options.repeats), *(["--quick"] if options.quick else [])]  # fmt: skip
    environment = os.environ | {"OMP_WAIT_POLICY": policy}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: dict[str, list[dict[str, float]]] = json.loads(done.stdout)
    return rows


def main() -> None:
    options = arguments(
        __doc__ or "",
        more=lambda parser: parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS),
    )
    sizes = SIZES[:2] if options.quick else SIZES
    if options.child:
        print(json.dumps(measure(sizes, options.threads, options.repeats)))
        return
    report = Report("threads", options)
    for policy in ("active", "passive"):
        print(f"\nOMP_WAIT_POLICY={policy}: microseconds (speed-up by {options.threads} threads)")
        print(f"{'':18}" + "".join(f"{size // 1024:>11} KiB" for size in sizes))
        for name, rows in child_of(policy, options).items():
            print(f"{name:18}" + "".join(f"{row['us']:9.1f} ({row['speed-up']:.2f})" for row in rows))
            report.data["tables"].append({"title": f"{name}, {policy}", "rows": rows})
    report.finish()


if __name__ == "__main__":
    main()

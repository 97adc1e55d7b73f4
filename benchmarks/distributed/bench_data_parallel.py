"""Time a training step in two processes of one thread: this package in C++ and Python beside PyTorch's classes.

Each candidate runs in two processes of its own, over Gloo on this machine, and reports the median of its steps. The
candidates take turns. DeepSpeed takes part if it is installed (`make test-deepspeed` says how). The step is forward, backward with the reduction of gradients, and AdamW with 8-bit state, which
FSDP2 has in PyTorch's fused form. The limit is the step of one process, without communication. The C++ program is that of tests/distributed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shoestring
from benchmarks.common import Report, arguments
from shoestring.optim import AdamW

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("SHOESTRING_BUILD", ROOT / "build")) / "tests/distributed/distributed_program"
LAYERS, STEPS = 8, 12


def worker(kind: str, width: int, rows: int) -> None:
    """Train in this process, one of those that the environment describes; rank 0 prints the seconds of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    if kind.startswith("DeepSpeed"):
        time_deepspeed(int(kind[-1]), model, torch.randn(rows, width))
        return
    torch.distributed.init_process_group("gloo")
    optimizer: torch.optim.Optimizer
    if kind == "FSDP2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    elif kind in ("DDP", "ZeRO"):
        model = DistributedDataParallel(model)
        if kind == "ZeRO":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-6)
        else:
            optimizer = AdamW(model.parameters(), lr=1e-6)
    else:
        model = nn.Sequential(model)  # the layers are the blocks of "zero3"
        shoestring.parallelize(model, kind)
        optimizer = AdamW(model.parameters(), lr=1e-6)
    x = torch.randn(rows, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    time_steps(step)


def time_steps(step: Callable[[], None]) -> None:
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    if torch.distributed.get_rank() == 0:
        print(statistics.median(times[2:]))
    torch.distributed.destroy_process_group()


def time_deepspeed(stage: int, model: nn.Module, x: Tensor) -> None:
    """Time steps of DeepSpeed's engine with our AdamW, without its operators for shared memory, by Gloo."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=os.environ["RANK"])
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        optimizer = AdamW(model.parameters(), lr=1e-6)
        config = {
            "train_micro_batch_size_per_gpu": len(x),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    time_steps(step)


def seconds(command: list[str], ranks: int) -> float:
    """Run a command in several processes; return the number that rank 0 prints."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    processes = [
        subprocess.Popen(
            command, env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode != 0:
            sys.exit(f"bench_data_parallel: {' '.join(command)}: a process ended with {process.returncode}")
    return float(outputs[0].split()[0])


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
        parser.add_argument(
            "--only", nargs="+", help="time only the candidates whose names contain one of these texts"
        )

    options = arguments(__doc__.splitlines()[0], more=more)
    if options.worker:
        kind, width, rows = options.worker
        worker(kind, int(width), int(rows))
        return
    width, rows = (128, 32) if options.quick else (1024, 256)
    sizes = [str(width), str(rows)]
    python = [sys.executable, "-m", "benchmarks.distributed.bench_data_parallel", "--worker"]
    commands: dict[str, tuple[list[str], int]] = {
        "shoestring, C++ DataParallel": ([str(PROGRAM), "time", "parallel", *sizes], 2),
        "shoestring, C++ DataParallel, shard": ([str(PROGRAM), "time", "shard", *sizes], 2),
        "shoestring, C++ shard with gradients": ([str(PROGRAM), "time", "gradients", *sizes], 2),
        "shoestring, C++ FullyShard": ([str(PROGRAM), "time", "fully", *sizes], 2),
        **{
            f"shoestring, parallelize {kind}": ([*python, kind, *sizes], 2)
            for kind in ("ddp", "zero1", "zero2", "zero3")
        },
        "PyTorch, DistributedDataParallel": ([*python, "DDP", *sizes], 2),
        "PyTorch, ZeroRedundancyOptimizer": ([*python, "ZeRO", *sizes], 2),
        "PyTorch, fully_shard": ([*python, "FSDP2", *sizes], 2),
        **{
            f"DeepSpeed, stage {stage}, our AdamW": ([*python, f"DeepSpeed{stage}", *sizes], 2)
            for stage in (0, 1, 2, 3)
            if importlib.util.find_spec("deepspeed") is not None
        },
        "limit: one process": ([str(PROGRAM), "time", "alone", *sizes], 1),
    }
    if options.only:
        commands = {name: c for name, c in commands.items() if any(text in name for text in options.only)}
    report = Report("data_parallel", options)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.repeats):
        for name, (command, ranks) in commands.items():
            times[name].append(seconds(command, ranks))
    report.table(f"A step of {LAYERS} layers of {width}, {rows} rows in each process", times, 1.0, "steps/s")
    report.finish()


if __name__ == "__main__":
    main()

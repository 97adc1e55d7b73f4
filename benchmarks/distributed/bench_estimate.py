"""Compare the seconds of a step that `shoestring estimate` predicts with those of two processes over a slow link.

Each process has a network namespace of its own (`unshare`), and the kernel's token bucket (`tc`) limits what each sends
over the pair of devices between them. The link and the step without communication are measured in the same processes,
one after the other. Layers sleep instead of computing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring
from benchmarks.common import arguments
from shoestring.distributed import measure_link
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.ranks import estimate_rank

WAYS = [("ddp", "none"), ("ddp", "8bit"), ("zero1", "none"), ("zero2", "none"), ("zero3", "none")]
LAYERS, STEPS = 16, 9
SECONDS = 0.03  # of the forward of a layer

NETWORK = """
set -e
ip link set lo up
mkfifo {folder}/go
unshare --net sh -c 'read go < {folder}/go; exec {worker} 1' &
other=$!
sleep 0.5
ip link add left type veth peer name right
ip link set right netns $other
ip addr add 10.0.0.1/24 dev left
ip link set left up
nsenter --net=/proc/$other/ns/net sh -c 'ip link set lo up; ip addr add 10.0.0.2/24 dev right; ip link set right up; tc qdisc add dev right root tbf {rate}'
tc qdisc add dev left root tbf {rate}
echo go > {folder}/go
{worker} 0
wait $other
"""


class Sleep(torch.autograd.Function):
    """Sleep in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Layer(nn.Linear):
    """A layer of which most of the time is sleep, so that a busy machine computes as fast as an idle one."""

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(super().forward(x), SECONDS)


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Layer(width, width, bias=False) for _ in range(LAYERS))))


def seconds_of_steps(model: nn.Module, optimizer: Any, rows: int, width: int) -> float:
    """Return the median of the seconds of a step, of the slower rank."""
    x, times = torch.randn(rows, width), []
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    found = torch.tensor(times[2:])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def worker(rank: int, width: int, rows: int, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["GLOO_SOCKET_IFNAME"] = ("left", "right")[rank]
    dist.init_process_group(
        "gloo", init_method="tcp://10.0.0.1:29500", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    link = measure_link(sizes=[1 << 18, 1 << 20, 4 << 20])
    make = functools.partial(network, width)
    found = []
    for strategy, compress in WAYS:
        model = make()
        alone = seconds_of_steps(model, shoestring.optim.AdamW(model.parameters(), lr=1e-5), rows, width)
        model = make()
        report = shoestring.parallelize(model, strategy, compress=None if compress == "none" else compress)
        optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-5)
        measured = seconds_of_steps(model, optimizer, rows, width)
        with torch.device("meta"):
            expected = estimate_rank(
                make(),
                EstimateConfig(
                    model="", world=2, parallel=strategy, compress=compress, device="cpu", step_seconds=alone,
                    link=f"{link.bandwidth:.0f}B/s,{link.latency * 1e9:.0f}ns",
                ),
            )  # fmt: skip
        del optimizer
        report.undo()
        found.append((strategy, compress, alone, expected.seconds, measured))
    if rank == 0:
        out.write_text(json.dumps({"link": str(link), "rows": found}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
        parser.add_argument("--mbit", type=int, default=400, help="Mbit/s that each process can send")

    options = arguments(__doc__.splitlines()[0], more=more)
    if options.worker:
        width, rows, out, rank = options.worker
        worker(int(rank), int(width), int(rows), Path(out))
        return
    width, rows = (64, 4) if options.quick else (1024, 4)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.distributed.bench_estimate", "--worker"]
        script = NETWORK.format(
            folder=folder, worker=shlex.join([*command, str(width), str(rows), str(out)]),
            rate=f"rate {options.mbit}mbit burst 64kb latency 400ms",
        )  # fmt: skip
        subprocess.run(["unshare", "--map-root-user", "--net", "sh", "-c", script], check=True)
        found = json.loads(out.read_text())
    print(f"{LAYERS} layers of {width}, {rows} rows in each process; --link {found['link']}")
    for strategy, compress, alone, expected, measured in found["rows"]:
        print(
            f"{strategy:6} {compress:5} {alone:.3f} s without communication; predicted {expected:.3f} s, measured "
            f"{measured:.3f} s, ratio {expected / measured:.2f}"
        )


if __name__ == "__main__":
    main()

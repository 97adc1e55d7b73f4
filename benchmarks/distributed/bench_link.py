"""Measure the latency and the bandwidth between two Gloo processes, in the form that `shoestring estimate --link` takes.

Without torchrun, both processes run on this machine. On two machines, `torchrun --nnodes 2 --nproc-per-node 1 ... -m
benchmarks.distributed.bench_link` measures the network between them. The latency is half of the time of a message of 4
bytes and its answer. The bandwidth is the slope of the time of a message and an answer of 4 bytes, by the size of the
message.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.common import arguments
from shoestring.distributed.links import Link

SIZES = [1 << 20, 4 << 20, 16 << 20]


def measure_link(sizes: list[int], repeats: int) -> Link:
    """Return the link between ranks 0 and 1 of the default group. Both ranks must call it; others only wait.

    Args:
        sizes: bytes of the messages.
        repeats: messages of each size, of which the median counts.
    """
    rank = dist.get_rank()
    if rank > 1:
        dist.barrier()
        return Link(1.0, 0.0)
    peer = 1 - rank
    small = torch.zeros(1)

    def ping(size: int) -> None:
        """Send a message from rank 0, and answer it."""
        message = torch.zeros(size // 4)
        if rank == 0:
            dist.send(message, peer)
            dist.recv(small, peer)
        else:
            dist.recv(message, peer)
            dist.send(small, peer)

    def median(size: int, times: int) -> float:
        found = []
        for number in range(times + 1):
            began = time.perf_counter()
            ping(size)
            if number:
                found.append(time.perf_counter() - began)
        return statistics.median(found)

    latency = median(4, 20 * repeats) / 2
    seconds = [median(size, repeats) for size in sizes]
    mean_size, mean_time = statistics.mean(sizes), statistics.mean(seconds)
    slope = sum((size - mean_size) * (s - mean_time) for size, s in zip(sizes, seconds, strict=True)) / sum(
        (size - mean_size) ** 2 for size in sizes
    )
    if dist.get_world_size() > 2:
        dist.barrier()
    return Link(1 / slope, latency)


def worker(rank: int, store: str, sizes: list[int], repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link = measure_link(sizes, repeats)
    if rank == 0:
        Path(out).write_text(json.dumps([link.bandwidth, link.latency]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    sizes = [1 << 16, 1 << 18] if options.quick else SIZES
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        link = measure_link(sizes, options.repeats)
        is_first = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
        if not is_first:
            return
    else:
        with TemporaryDirectory() as folder:
            out = str(Path(folder) / "link.json")
            given = (str(Path(folder) / "store"), sizes, options.repeats, out)
            torch.multiprocessing.spawn(worker, given, nprocs=2)
            link = Link(*json.loads(Path(out).read_text()))
    print(f"latency {link.latency * 1e6:.1f} us, bandwidth {link.bandwidth / 1e9:.3f} GB/s")
    print(f"--link {link}")


if __name__ == "__main__":
    main()

"""Measure the latency and the bandwidth between two Gloo processes, in the form that `shoestring estimate --link` takes.

Without torchrun, both processes run on this machine. On two machines, `torchrun --nnodes 2 --nproc-per-node 1 ... -m
benchmarks.distributed.bench_link` measures the network between them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.common import arguments
from shoestring.distributed import Link, measure_link

SIZES = [1 << 20, 4 << 20, 16 << 20]


def worker(rank: int, store: str, sizes: list[int], repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link = measure_link(sizes=sizes, repeats=repeats)
    if rank == 0:
        Path(out).write_text(json.dumps([link.bandwidth, link.latency]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    sizes = [1 << 16, 1 << 18] if options.quick else SIZES
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        link = measure_link(sizes=sizes, repeats=options.repeats)
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

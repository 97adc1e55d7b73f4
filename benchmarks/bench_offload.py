"""A step of AdamW whose state lies on a disk or in host memory: the step, its transfers alone, and fio as the limit.

Every row moves the state once each way; the rate counts both. "transfers alone" takes and puts every chunk and steps
nothing; fio reads and writes as many bytes, half of each, in blocks of a chunk's parts (`apt install fio`; left out where
there is none). Reads and writes pass the page cache by.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import Report, arguments, interleave
from torch.nn import Parameter

from shoestring.optim import AdamW


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--millions", type=int, default=64, help="of parameters")


def optimizer(count: int, state: str, offload: str | None) -> AdamW:
    """One that has stepped bf16 weights once."""
    p = Parameter(torch.zeros(count, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)
    opt = AdamW([p], state=state, weights="stochastic", offload=offload)
    opt.step()
    return opt


def transfers(opt: AdamW) -> Callable[[], None]:
    """Every chunk, there and back."""
    offloaded = opt._layouts[0].arenas[0].offloaded
    chunks = offloaded.chunks(0, 1)

    def run() -> None:
        offloaded.start(chunks)
        for chunk in chunks:
            offloaded.take(chunk)
            offloaded.put(chunk)
        offloaded.finish()
        offloaded.commit()

    return run


def fio_seconds(folder: str, size: int, rounds: int) -> list[float]:
    """Of reading and writing `size` bytes each, mixed, in each round."""
    if shutil.which("fio") is None:
        return []
    # 4 MiB: a moment's part of a chunk; 8 at a time: the slots' parts.
    command = ["fio", "--name=swap", f"--directory={folder}", "--rw=randrw", "--bs=4m", "--iodepth=8", "--direct=1",
               "--ioengine=io_uring", f"--size={2 * size}", "--output-format=json", "--fallocate=posix", "--unlink=1"]
    found = []
    for _ in range(rounds):
        job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
        bytes_moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        found.append(job["job_runtime"] * 1e-3 * 2 * size / bytes_moved)
    return found


def main() -> None:
    options = arguments(str(__doc__), more=own)
    report = Report("offload", options)
    count = (4 if options.quick else options.millions) * 1_000_000
    for state in ("8bit", "fp32"):
        disk, host, plain = (optimizer(count, state, where) for where in (f"nvme:{options.folder}", "stream", None))
        kept = disk._layouts[0].arenas[0].values
        size = sum(part.numel() * part.element_size() for part in kept.values())
        times = interleave(
            {
                "step, state on the disk": disk.step,
                "the disk's transfers alone": transfers(disk),
                "step, state in host memory": host.step,
                "step, state on the device": plain.step,
            },
            options.repeats,
        )
        fio = fio_seconds(options.folder, size, 1 if options.quick else 3)
        if fio:
            times["fio, as many bytes"] = [statistics.median(fio)] * options.repeats
        report.table(f"AdamW, {state} state, {count / 1e6:.0f} M bf16 parameters, {size / 1e6:.0f} MB",
                     times, 2 * size * 1e-9, "GB/s")


if __name__ == "__main__":
    main()

"""Train a small Llama in two processes over a slow link: gradients in few bits beside whole ones and PowerSGD.

The processes run in a network namespace of their own (`unshare`), whose loopback device the kernel's token bucket limits
(`tc`), so sockets, latencies and bytes are real. Bytes are those that the device counts, with the headers of TCP. The
text is Python's standard library. Each way takes the same steps; the table says when it has reached the loss of whole
gradients, within 1 %. DiLoCo averages ten times; losses are those of the first process's weights.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import shoestring
from benchmarks.common import Report, arguments
from shoestring.training.run.models import Preset, build_preset

RANKS = 2
LENGTH = 128
WAYS = {
    "shoestring, 8bit": ("AdamW", "8bit"),
    "shoestring, 4bit": ("AdamW", "4bit"),
    "shoestring, DiLoCo, 4bit": ("AdamW", "diloco"),
    "PyTorch, PowerSGD of rank 4": ("AdamW", "powersgd"),
    "PyTorch, whole gradients in fp32": ("AdamW", "none"),
    "shoestring, 1bit, Lion": ("Lion", "1bit"),
    "PyTorch, whole gradients in fp32, Lion": ("Lion", "none"),
}


def batches(text: Tensor, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (rows,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def sent_bytes() -> int:
    """Return the bytes that the loopback device of this namespace has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def worker(rank: int, port: int, optimizer: str, compress: str, steps: int, width: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    held = len(text) // 10
    torch.manual_seed(0)
    shape = Preset(hidden=width, mlp=4 * width, layers=4, heads=4, kv_heads=4, tied=False)
    model = build_preset(shape, 256, LENGTH, 0)
    elements = sum(p.numel() for p in model.parameters())
    if compress != "diloco":
        shoestring.parallelize(model, "ddp", compress=None if compress == "none" else compress)
    if optimizer == "AdamW":
        opt: torch.optim.Optimizer = shoestring.optim.AdamW(model.parameters(), lr=2e-3)
    else:
        opt = shoestring.optim.Lion(model.parameters(), lr=3e-4)
    average = None
    if compress == "diloco":
        average = shoestring.distributed.DiLoCo(opt, every=max(1, steps // 10), compress="4bit")
    losses, times, began = [], [], 0.0
    trained, counted = 0.0, 0
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                ids = batches(text[-held:], 32, 7)
                losses.append(model(input_ids=ids, labels=ids).loss.item())
            times.append(trained)
        if step == steps:
            break
        dist.barrier()
        before = sent_bytes()
        began = time.perf_counter()
        ids = batches(text[:-held], 4, 1000 * step + rank)
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
        if average is not None:
            average.step()
        dist.barrier()
        trained += time.perf_counter() - began
        if step >= steps // 2:
            counted += sent_bytes() - before
    if rank == 0:
        per_parameter = counted / (steps - steps // 2) / elements / RANKS
        found = {"losses": losses, "times": times, "bytes": per_parameter, "elements": elements}
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(way: tuple[str, str], options: argparse.Namespace, out: Path) -> dict[str, object]:
    """Run the processes of a way in a namespace with a slow link."""
    python = shlex.join([sys.executable, "-m", "benchmarks.distributed.bench_slow_link"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = f"{port} {way[0]} {way[1]} {options.steps} {options.width} {shlex.quote(str(out))}"
    link = f"tc qdisc add dev lo root tbf rate {RANKS * options.mbit}mbit burst 256kb latency 400ms"
    ranks = " ".join(f"{python} --worker {rank} {sizes} &" for rank in range(RANKS))
    script = f"set -e; export TORCH_CPP_LOG_LEVEL=ERROR; ip link set lo up; {link}; {ranks} wait"
    subprocess.run(["unshare", "--map-root-user", "--net", "sh", "-c", script], check=True)
    found: dict[str, object] = json.loads(out.read_text())
    return found


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
        parser.add_argument("--mbit", type=int, default=100, help="Mbit/s that each process can send")
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--width", type=int, default=128)

    options = arguments(__doc__.splitlines()[0], more=more)
    if options.worker:
        rank, port, optimizer, compress, steps, width, out = options.worker
        worker(int(rank), int(port), optimizer, compress, int(steps), int(width), Path(out))
        return
    if options.quick:
        options.steps, options.width = 10, 32
    report = Report("slow_link", options)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: measure(way, options, Path(folder) / f"{i}.json")
            for i, (name, way) in enumerate(WAYS.items())
        }
    for optimizer in ("AdamW", "Lion"):
        own = {name: found[name] for name, way in WAYS.items() if way[0] == optimizer}
        plain = next(found[name] for name, way in WAYS.items() if way == (optimizer, "none"))
        target = 1.01 * plain["losses"][-1]  # type: ignore[index]
        times: dict[str, list[float]] = {}
        columns: dict[str, dict[str, float | None]] = {}
        for name, way in own.items():
            losses, seconds = way["losses"], way["times"]
            assert isinstance(losses, list) and isinstance(seconds, list)
            times[name] = [seconds[-1] / options.steps]
            reached = [t for t, loss in zip(seconds, losses, strict=True) if loss <= target]
            columns[name] = {
                "loss": losses[-1],
                "s to the loss": min(reached) if reached else None,
                "B/parameter": float(str(way["bytes"])),
            }
        elements = plain["elements"]
        report.table(
            f"A step of a Llama of {elements} parameters with {optimizer}, {RANKS} processes, {options.mbit} Mbit/s each; "
            f"after {options.steps} steps",
            times,
            1.0,
            "steps/s",
            columns,
        )
    report.finish()


if __name__ == "__main__":
    main()

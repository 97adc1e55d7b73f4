"""Compare gradient checkpointing with torch.utils.checkpoint, and measure plans under a byte budget.

The model is a sequence of Llama-style blocks. The row "recomputation" is a step without checkpointing plus
one more forward pass. A checkpoint that recomputes its whole forward pass (no early stop) takes at least this
time.

A budget limits the peak memory that forward and backward allocate, without gradients, as counted by the
allocator. The option --process runs the model once in a new process and prints the high-water mark of that
process.

Offloading of saved tensors is compared with PyTorch's save_on_cpu, which copies to ordinary tensors while the
model waits. torchtune's class for offloading is left out, because it needs a GPU: it uses CUDA streams and
always copies back to "cuda".
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import shoestring
from benchmarks.common import Report, arguments, interleave
from shoestring.checkpoint.measure import metered
from shoestring.training import memory

SELECTED = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stepper(
    blocks: nn.ModuleList, x: Tensor, wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]]
) -> Callable[[], None]:
    runs = [wrap(block) for block in blocks]

    def step() -> None:
        y = x
        for run in runs:
            y = run(y)
        y.square().mean().backward()

    return step


def overhead(report: Report, depth: int, width: int, tokens: int, repeats: int) -> None:
    model, x = Model(depth, width), torch.randn(1, tokens, width, requires_grad=True)
    selective = functools.partial(create_selective_checkpoint_contexts, SELECTED)
    step = functools.partial(stepper, model.blocks, x)
    keep = ["attention", "products"]
    candidates = {
        "shoestring.checkpoint": step(lambda block: lambda y: shoestring.checkpoint(block, y)),
        "torch.utils.checkpoint": step(
            lambda block: lambda y: torch_checkpoint(block, y, use_reentrant=False)
        ),
        "no checkpoint": step(lambda block: block),
        "forward alone": lambda: model(x),
        "shoestring, keep attention, products": step(
            lambda block: lambda y: shoestring.checkpoint(block, y, keep=keep)
        ),
        "torch, selective, the same": step(
            lambda block: lambda y: torch_checkpoint(block, y, use_reentrant=False, context_fn=selective)
        ),
    }
    times = interleave(candidates, repeats)
    report.table(
        f"{depth} blocks of {width}, {tokens} tokens, fp32, one step", times, tokens / 1e3, "k tokens/s"
    )
    for name in ("shoestring.checkpoint", "torch.utils.checkpoint"):
        rounds = zip(times[name], times["no checkpoint"], times["forward alone"], strict=True)
        ratio = statistics.median(ours / (plain + forward) for ours, plain, forward in rounds)
        print(f"  {name}: {ratio:.3f} of the step and one more forward")


def seconds_and_peak(model: nn.Module, x: Tensor) -> tuple[float, int]:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with metered() as meter:
        began = time.perf_counter()
        model(x).backward()
        return time.perf_counter() - began, meter.peak()


def budgets(report: Report, depth: int, width: int, tokens: int, repeats: int) -> None:
    """Compare the predicted peak and time of plans with measurements, and with a run without a budget."""
    model, x = Model(depth, width), torch.randn(1, tokens, width)
    free = min((seconds_and_peak(model, x) for _ in range(repeats)), key=lambda pair: pair[0])
    print(
        f"\n{depth} blocks of {width}, {tokens} tokens, fp32: {free[1] / 2**20:.1f} MiB and {free[0]:.3f} s without a budget"
    )
    for part in (0.66, 0.5, 0.33, 0.25):
        planned(report, model, x, int(part * free[1]), repeats, None, f"{part:.2f}")
    report.finish()


def planned(
    report: Report, model: nn.Module, x: Tensor, budget: int, repeats: int,
    offload: shoestring.offload_activations | None, name: str,
) -> None:  # fmt: skip
    try:
        applied = shoestring.checkpoint_model(model, budget=budget, example=lambda: model(x), offload=offload)
    except RuntimeError as error:
        print(f"  {name}: {str(error).splitlines()[0]}")
        return
    assert applied.plan is not None
    choices = [choice for _, choice in applied.blocks]
    times = interleave({"plan": lambda: seconds_and_peak(model, x)}, repeats)["plan"]
    peak = seconds_and_peak(model, x)[1]
    applied.undo()
    plain = interleave({"plain": lambda: seconds_and_peak(model, x)}, repeats)["plain"]
    row = {
        "part": name, "budget": budget, "peak": peak, "predicted_peak": applied.plan.peak_bytes,
        "seconds": statistics.median(times), "predicted_seconds": applied.plan.seconds,
        "free_seconds": statistics.median(plain),
        "choices": {name: choices.count(name) for name in sorted(set(choices))},
    }  # fmt: skip
    report.data["tables"].append(
        {"title": f"budget of {len(choices)} blocks, {tuple(x.shape)}", "rows": [row]}
    )
    print(
        f"  {name}: peak {peak / budget:.3f} of the budget, predicted {applied.plan.peak_bytes / peak:.3f} of it; "
        f"{row['seconds'] / row['free_seconds']:.2f} times the time, predicted "
        f"{applied.plan.seconds / row['seconds']:.2f} of it; {row['choices']}"
    )


def offloading(report: Report, depth: int, width: int, tokens: int, repeats: int, folder: str) -> None:
    """Compare offloading of saved tensors to host memory or to a disk with save_on_cpu.

    Then measure plans that may offload to host memory or disk under a budget.
    """
    model, x = Model(depth, width), torch.randn(1, tokens, width)
    tiers = {
        "host": shoestring.offload_activations(device="cpu", exclude=model),
        "disk": shoestring.offload_activations(device="cpu", exclude=model, folder=folder),
    }
    handles = []

    def run(context: AbstractContextManager[object]) -> None:
        with context:
            loss = model(x)
        loss.backward()

    # for each implementation: (peak bytes of PyTorch tensors, bytes of host memory that offloading uses in
    # addition)
    peaks: dict[str, tuple[int, int]] = {}
    candidates: dict[str, Callable[[], object]] = {}
    for name, offload in tiers.items():
        candidates[f"shoestring, {name}"] = functools.partial(run, offload)
        handles += offload.mark_layers(model.blocks)
        peaks[f"shoestring, {name}"] = (
            peak_of(candidates[f"shoestring, {name}"], model),
            offload.statistics()["host"],
        )
    # For CPU tensors, save_on_cpu copies only with pin_memory=True; otherwise it keeps the tensors
    # themselves. Without a GPU, pin_memory=True does not pin memory.
    candidates["save_on_cpu"] = lambda: run(torch.autograd.graph.save_on_cpu(pin_memory=True))
    peaks["save_on_cpu"] = (peak_of(candidates["save_on_cpu"], model), 0)
    candidates["nothing leaves"] = lambda: run(nullcontext())
    peaks["nothing leaves"] = (peak_of(candidates["nothing leaves"], model), 0)
    report.table(
        f"what is saved leaves, {depth} blocks of {width}, {tokens} tokens, fp32, one step",
        interleave(candidates, repeats), tokens / 1e3, "k tokens/s",
    )  # fmt: skip
    for name, (tensors, host) in peaks.items():
        print(f"  {name}: {tensors / 2**20:.0f} MiB of tensors, {host / 2**20:.0f} of host memory besides")
    report.data["tables"].append(
        {"title": "memory of what leaves", "rows": [{"name": n, "bytes": p} for n, p in peaks.items()]}
    )
    for handle in handles:
        handle.remove()
    free = peaks["nothing leaves"][0]
    for name, options in {"host": {"host_bytes": 1 << 40}, "disk": {}}.items():
        for part in (0.3, 0.15):
            offload = shoestring.offload_activations(device="cpu", exclude=model, folder=folder, **options)
            planned(report, model, x, int(part * free), repeats, offload, f"{part:.2f}, {name}")
    report.finish()


def peak_of(run: Callable[[], object], model: nn.Module) -> int:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with metered() as meter:
        run()
        return meter.peak()


def process(depth: int, width: int, tokens: int, budget: int) -> None:
    """Print the memory of three training steps in this process, and the seconds of the fastest step.

    The memory is the high-water mark of the process minus its resident bytes before the steps.
    """
    model, x = Model(depth, width), torch.randn(1, tokens, width)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = memory.resident_bytes()
    if budget:
        shoestring.checkpoint_model(model, budget=budget, example=lambda: model(x))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        model(x).backward()
        times.append(time.perf_counter() - began)
    print(memory.peak_bytes() - before, min(times))


def high_water(report: Report, depth: int, width: int, tokens: int, threads: int) -> None:
    model, x = Model(depth, width), torch.randn(1, tokens, width)
    free = seconds_and_peak(model, x)[1]
    del model

    def run(budget: int) -> tuple[int, float]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.checkpoint.bench_checkpoint",
            "--threads",
            str(threads),
            "--process",
            f"{depth},{width},{tokens},{budget}",
        ]
        # Without this setting, glibc keeps freed memory in its heap. The high-water mark would then measure
        # fragmentation instead of the memory that the steps need.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        size, seconds = done.stdout.split()
        return int(size), float(seconds)

    (plain, plain_seconds), (fitted, fitted_seconds) = run(0), run(free // 3)
    print(
        f"\n{depth} blocks of {width}, {tokens} tokens, a process each: high-water mark {plain / 2**20:.0f} MiB above the model, "
        f"{fitted / 2**20:.0f} under a third of the activations ({fitted / plain:.2f}), "
        f"{fitted_seconds / plain_seconds:.2f} times the time"
    )
    row = {"plain": plain, "fitted": fitted, "plain_seconds": plain_seconds, "fitted_seconds": fitted_seconds}
    report.data["tables"].append(
        {"title": f"high-water mark, {depth} x {width}, {tokens} tokens", "rows": [row]}
    )
    report.finish()


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--process", help=argparse.SUPPRESS)
        parser.add_argument("--only", choices=["overhead", "budget", "offload", "process"], help="one part")
        parser.add_argument(
            "--folder", default=tempfile.gettempdir(), help="for the swap file; a disk, not tmpfs"
        )

    options = arguments(__doc__.splitlines()[0], more=more)
    if options.process:
        process(*map(int, options.process.split(",")))
        return
    report = Report("checkpoint", options)
    depth, width, tokens = (4, 128, 128) if options.quick else (24, 384, 1024)
    if options.only in (None, "overhead"):
        overhead(report, 4, width if options.quick else 768, tokens, options.repeats)
    if options.only in (None, "budget"):
        budgets(report, depth, width, tokens, options.repeats)
    if options.only in (None, "offload"):
        offloading(report, depth, width, tokens, options.repeats, options.folder)
    if options.only in (None, "process"):
        high_water(report, depth, width, tokens, options.threads)


if __name__ == "__main__":
    main()

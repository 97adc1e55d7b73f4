"""Time AdamW steps with state on a disk or in host memory; the limits are the transfers alone, and fio.

Every row moves the state once in each direction, and the rate counts both directions. The row "the
disk's transfers alone" reads and writes every chunk of state without computing a step. fio reads and writes
extents of the same sizes in the same order, with the same queue depth, in a file of its own on that disk.
Like shoestring's, its memory is in huge pages. A second fio job moves as many bytes in sequential blocks of 4
MiB, half reads and half writes, at a depth of 8. fio is left out if it is not installed (`apt install fio`).
All reads and writes bypass the page cache.

The table of the CPU step: a step takes bf16 gradients, clips them to a norm and writes bf16 weights, with
fp32 state. shoestring makes one pass over weights and gradients (2 bytes each), remainders (2 bytes) and two
moments (8 bytes). It reads all of them and writes all but the gradients: 26 bytes per parameter. The norm
takes one earlier pass over the gradients: 2 bytes per parameter.

The DeepSpeed row does what ZeRO-Offload does around DeepSpeedCPUAdam: cast to fp32, norm, clip, step of an
fp32 master weight, cast to bf16. It is left out if DeepSpeed is not installed: `pip install wheel && pip
install --no-build-isolation deepspeed`. Its first use builds an operator with g++.

`--device cuda` compares state that is streamed from host memory with pinned copies of as many bytes. It also
times a training step of a model of 1 B parameters with 8,192 tokens: with the optimizer on the GPU, and with
the optimizer on the CPU, where it steps during backward.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring import patch
from shoestring.ops import foreach_norm
from shoestring.optim import AdamW
from shoestring.training.config import PRESETS
from shoestring.training.run.models import build_preset

MAX_NORM = 1.0
SLOTS = 4  # number of chunks of state that are on the device at once


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--millions", type=int, default=64, help="of parameters")


def optimizer(count: int, state: str, offload: str | None) -> AdamW:
    """Return an AdamW with `count` bf16 weights, after one step, so that its state exists."""
    p = Parameter(torch.zeros(count, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)
    opt = AdamW([p], state_format=state, weight_rounding="stochastic", offload=offload)
    opt.step()
    return opt


def transfers(opt: AdamW) -> Callable[[], None]:
    """Return a function that reads every chunk of state and writes it back, without computing a step."""
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


class Fio:
    """Repeats the disk transfers of a step with fio: the same sizes, offsets, order and queue depth."""

    STEPS = 4  # steps per run of fio, because a single step would be too short to time

    def __init__(self, opt: AdamW, folder: Path) -> None:
        offloaded = opt._layouts[0].arenas[0].offloaded
        sizes = [part.nbytes for part in offloaded.values()]
        self.file, log = folder / "fio.data", folder / "fio.log"
        block = os.urandom(8 << 20)
        with open(self.file, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, sum(sizes))
            for at in range(0, sum(sizes), len(block)):
                file.write(block[: sum(sizes) - at])
            os.fsync(file.fileno())
        places = [sum(sizes[:i]) for i in range(len(sizes))]
        # a list per chunk of state, with "<offset> <size>" for each of its parts
        extents: list[list[str]] = []
        chunks = offloaded.chunks(0, 1)
        offloaded.start(chunks)
        for chunk in chunks:
            parts = [part.nbytes for part in offloaded.take(chunk)]
            offloaded.put(chunk)
            extents.append([f"{at} {size}" for at, size in zip(places, parts, strict=True)])
            places = [at + size for at, size in zip(places, parts, strict=True)]
        offloaded.finish()
        offloaded.commit()
        lines = [
            f"{self.file} {kind} {place}" for kind, chunk in order(len(extents)) for place in extents[chunk]
        ]
        head = ["fio version 2 iolog", f"{self.file} add", f"{self.file} open"]
        log.write_text("\n".join([*head, *(lines * self.STEPS), f"{self.file} close"]) + "\n")
        depth = (SLOTS - 1) * len(sizes)
        self.same = [f"--read_iolog={log}", "--replay_no_stall=1", f"--iodepth={depth}"]
        self.mixed = [f"--filename={self.file}", "--rw=rw", "--bs=4m", "--iodepth=8", f"--size={sum(sizes)}",
                      f"--io_size={2 * sum(sizes) * self.STEPS}", "--overwrite=1"]  # fmt: skip
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, job: list[str]) -> None:
        """Run a fio job and keep its seconds per step, without the start-up of fio.

        Like shoestring's, fio's memory is in huge pages.
        """
        command = ["fio", "--name=swap", *job, "--direct=1", "--ioengine=io_uring", "--output-format=json"]
        env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        self.seconds.setdefault(name, []).append(
            json.loads(out)["jobs"][0]["job_runtime"] * 1e-3 / self.STEPS
        )

    def candidates(self) -> Candidates:
        """Return two fio jobs: a step's transfers, and as many bytes in reads and writes of 4 MiB each."""
        jobs = {"fio, the same transfers": self.same, "fio, mixed, 4 MiB, depth 8": self.mixed}
        return {name: functools.partial(self.run, name, job) for name, job in jobs.items()}


def order(chunks: int) -> list[tuple[str, int]]:
    """Return the order in which a step reads and writes its chunks of state.

    While the optimizer updates one chunk, two chunks are being read and one is being written.
    """
    ahead = SLOTS - 1
    found = [("read", chunk) for chunk in range(min(ahead, chunks))]
    for chunk in range(chunks):
        found.append(("write", chunk))
        if chunk + ahead < chunks:
            found.append(("read", chunk + ahead))
    return found


@functools.cache
def deepspeed() -> Callable[[list[Parameter]], torch.optim.Optimizer] | None:
    """Return the constructor of DeepSpeedCPUAdam as AdamW, or None if it is missing or cannot be built."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"} | dict(os.environ)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([Parameter(torch.zeros(1))])  # the first call builds DeepSpeed's operator
        return functools.partial(DeepSpeedCPUAdam, weight_decay=1e-2)
    except ImportError:
        print("DeepSpeed is left out: it is not installed")
    # DeepSpeed fails without a compiler or the right CUDA toolkit; the remaining timings must continue
    except Exception as error:
        print(f"DeepSpeed is left out: {error}")
    return None


def deepspeed_step(opt: torch.optim.Optimizer, master: Parameter, weights: Tensor, grad: Tensor) -> None:
    """Do the CPU part of ZeRO-Offload, from the received bf16 gradient to the bf16 weights to send back."""
    torch._foreach_copy_([master.grad], [grad])
    norm = torch.linalg.vector_norm(master.grad)
    master.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    opt.step()
    weights.copy_(master.detach())


def streams(grad: Tensor, changed: list[Tensor], norm: bool) -> Callable[[], None]:
    """Return a function with a step's memory traffic: it reads the gradient and changes tensors in place.

    With `norm`, it reads the gradient a second time, as a step does that computes the gradient's norm.
    """
    grad, changed = grad.view(torch.int64), [t.view(torch.int64) for t in changed]

    def run() -> None:
        if norm:
            grad.sum()
        changed[0].add_(grad)
        for t in changed[1:]:
            t.add_(1)

    return run


def host_step(weights: Tensor, grad: Tensor) -> AdamW:
    """Return an AdamW with offload="cpu", which also copies gradients and weights between device and host.

    The weights are split into 16 parameters, so that copies and steps can overlap.
    """
    params = [Parameter(w.clone()) for w in weights.chunk(16)]
    for p, g in zip(params, grad.chunk(16), strict=True):
        p.grad = g
    return AdamW(
        params, state_format="fp32", weight_rounding="remainder", max_grad_norm=MAX_NORM, offload="cpu"
    )


def cpu_step(report: Report, count: int, repeats: int) -> None:
    """Time a CPU optimizer step from bf16 gradients to bf16 weights, with casts, norm and clipping."""
    weights, grad = (torch.randn(count).mul_(0.1).bfloat16() for _ in range(2))
    ours = Parameter(weights.clone())
    ours.grad = grad
    opt = AdamW([ours], state_format="fp32", weight_rounding="remainder", max_grad_norm=MAX_NORM)
    state = [torch.zeros(count, dtype=t) for t in (torch.int16, torch.float32, torch.float32)]
    candidates: Candidates = {
        "shoestring": opt.step,
        'shoestring, offload="cpu"': host_step(weights, grad).step,
        "limit: its streams": streams(grad, [weights.clone(), *state], norm=True),
    }
    master = Parameter(weights.float())
    master.grad = torch.zeros_like(master)
    if (make := deepspeed()) is not None:
        other = make([master])
        candidates["DeepSpeedCPUAdam, all of it"] = lambda: deepspeed_step(other, master, weights, grad)
        candidates["DeepSpeedCPUAdam, its step alone"] = other.step
    times = interleave(candidates, repeats)
    report.table(
        f"Step of a CPU, fp32 state, bf16 gradients and weights, clipped, {count / 1e6:.0f} M parameters, "
        f"{28 * count * 1e-9:.2f} GB",
        times,
        28 * count * 1e-9,
        "GB/s",
    )
    norms: Candidates = {
        "shoestring": lambda: foreach_norm([grad]),
        "torch, in fp32": lambda: torch.linalg.vector_norm(grad, dtype=torch.float32),
        "limit: gradients read": grad.view(torch.int64).sum,
    }
    report.table("The norm alone", interleave(norms, repeats), 2 * count * 1e-9, "GB/s")


def plain_step(report: Report, count: int, repeats: int) -> None:
    """Time an optimizer step on the CPU with everything in fp32: 28 bytes of memory traffic per parameter."""
    params = [Parameter(torch.zeros(count)) for _ in range(3)]
    grad = torch.randn(count)
    for p in params:
        p.grad = grad
    candidates: Candidates = {
        "shoestring": AdamW(params[:1], state_format="fp32").step,
        "torch fused": torch.optim.AdamW(params[1:2], fused=True).step,
        "limit: its streams": streams(grad, [torch.zeros(count) for _ in range(3)], norm=False),
    }
    if (make := deepspeed()) is not None:
        candidates["DeepSpeedCPUAdam"] = make(params[2:]).step
    report.table(
        f"AdamW, all fp32, {count / 1e6:.0f} M parameters",
        interleave(candidates, repeats),
        count / 1e6,
        "M params/s",
    )


def pinned_copies(size: int) -> Callable[[], object]:
    """Return a function that copies `size` pinned bytes to the GPU and, at the same time, as many back."""
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def run() -> None:
        current = torch.cuda.current_stream()
        for stream, to, come in zip(streams, (device[0], host[1]), (host[0], device[1]), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                to.copy_(come, non_blocking=True)
            current.wait_stream(stream)

    return run


def training(device: str, preset: str, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Time training steps of a bf16 Llama, with optimizer state on the device and with offload="cpu"."""
    candidates: Candidates = {}
    for name, own in {
        "state on the device": {},
        'offload="cpu", in backward': {"offload": "cpu", "step_in_backward": True},
        'offload="cpu", in backward, clipped': {
            "offload": "cpu",
            "step_in_backward": True,
            "max_grad_norm": 1.0,
        },
    }.items():
        with torch.device(device):
            model = build_preset(PRESETS[preset], 16384, tokens, 0).bfloat16()
            ids = torch.randint(16384, (1, tokens))
        patch(model)
        opt = AdamW(model.parameters(), state_format="8bit", weight_rounding="remainder", **own)

        def step(model: torch.nn.Module = model, opt: AdamW = opt, ids: Tensor = ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()

        candidates[name] = step
    return interleave(candidates, repeats, device)


def on_gpu(report: Report, quick: bool, repeats: int) -> None:
    """Compare streamed optimizer state with pinned copies; time training with the optimizer on the CPU."""
    count = 16_000_000 if quick else 512_000_000
    for state in ("8bit", "fp32"):
        with torch.device("cuda"):
            host, plain = (optimizer(count, state, where) for where in ("stream", None))
        size = sum(part.nbytes for part in host._layouts[0].arenas[0].values.values())
        candidates: Candidates = {
            "step, state in host memory": host.step,
            "step, state on the device": plain.step,
            "limit: as many bytes copied, page-locked, both ways at once": pinned_copies(size),
        }
        report.table(
            f"AdamW, {state} state, {count / 1e6:.0f} M bf16 parameters, {size / 1e6:.0f} MB",
            interleave(candidates, repeats, "cuda"),
            2 * size * 1e-9,
            "GB/s",
        )
    tokens = 1024 if quick else 8192
    times = training("cuda", "small" if quick else "1b", tokens, repeats)
    report.table(f"A step of a Llama, {tokens} tokens", times, tokens, "tokens/s")


def main() -> None:
    options = arguments(str(__doc__), ("cpu", "cuda"), own)
    report = Report("offload", options)
    if options.device == "cuda":
        on_gpu(report, options.quick, options.repeats)
        return
    count = (4 if options.quick else options.millions) * 1_000_000
    cpu_step(report, count, options.repeats)
    plain_step(report, count, options.repeats)
    for state in ("8bit", "fp32"):
        disk, host, plain = (
            optimizer(count, state, where) for where in (f"nvme:{options.folder}", "stream", None)
        )
        kept = disk._layouts[0].arenas[0].values
        size = sum(part.numel() * part.element_size() for part in kept.values())
        candidates: Candidates = {
            "step, state on the disk": disk.step,
            "the disk's transfers alone": transfers(disk),
            "step, state in host memory": host.step,
            "step, state on the device": plain.step,
        }
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            fio = Fio(disk, Path(folder)) if shutil.which("fio") is not None else None
            if fio is not None:
                candidates |= fio.candidates()
            times = interleave(candidates, options.repeats)
            if fio is not None:
                times |= {name: seconds[1:] for name, seconds in fio.seconds.items()}
        report.table(
            f"AdamW, {state} state, {count / 1e6:.0f} M bf16 parameters, {size / 1e6:.0f} MB",
            times,
            2 * size * 1e-9,
            "GB/s",
        )


if __name__ == "__main__":
    main()

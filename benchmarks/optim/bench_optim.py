"""Time a step of each optimizer: shoestring with each kind of state, torch, bitsandbytes, torchao, a limit.

The rows "limit" move as many bytes as a step in place, one tensor after another, and compute almost nothing.
They read and write weights and state, and read gradients. On a GPU, another row is a copy that moves as many
bytes. All optimizers of a table have equal weights and gradients.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.common import Candidates, Report, arguments, copy_probe, graphed, interleave
from shoestring.optim import (
    CAME,
    LAMB,
    SGD,
    Adafactor,
    AdamW,
    AdEMAMix,
    Lion,
    Muon,
    ScheduleFreeAdamW,
)

Maker = Callable[[list[Parameter]], torch.optim.Optimizer]
Makers = dict[str, Maker]

# Bytes of AdamW's state per parameter, for both moments. A block of 256 elements has its codes and fp32
# scales: one scale per moment for 8bit; for 4bit, 8 scales for one moment and 2 for the other.
STATE_BYTES = {"8bit": 2 * (256 + 4) / 256, "4bit": 2 * (128 + 4 * 5) / 256, "bf16": 4.0, "fp32": 8.0}
WEIGHTS = ("stochastic", "remainder")  # values of shoestring's option `weights` to time, besides the default


@dataclass(frozen=True)
class Rule:
    """An optimizer of shoestring, and the optimizers of torch and bitsandbytes to compare it with."""

    name: str
    ours: Callable[..., torch.optim.Optimizer]
    twin: str
    torch: Maker
    bitsandbytes: str | None = None
    shape: tuple[int, ...] = (4096, 4096)


RULES = [
    # Optimizers that torch does not have are compared with torch's AdamW.
    Rule("Lion", Lion, "AdamW fused", lambda p: fused(p), "Lion8bit"),
    Rule("AdEMAMix", AdEMAMix, "AdamW fused", lambda p: fused(p), "AdEMAMix8bit"),
    Rule("ScheduleFreeAdamW", ScheduleFreeAdamW, "AdamW fused", lambda p: fused(p)),
    Rule("LAMB", LAMB, "AdamW fused", lambda p: fused(p), "LAMB8bit"),
    Rule("SGD with momentum", functools.partial(SGD, momentum=0.9), "SGD fused",
         lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True), "SGD8bit"),
    # The matrices have the size of a layer, because the time of Muon's matrix products grows with the cube of
    # the size.
    Rule("Adafactor, with a mean", functools.partial(Adafactor, beta1=0.9), "Adafactor, without",
         torch.optim.Adafactor, shape=(2048, 2048)),
    Rule("CAME", CAME, "Adafactor", torch.optim.Adafactor, shape=(2048, 2048)),
    Rule("Muon", Muon, "Muon", lambda p: torch.optim.Muon(p), shape=(1024, 1024)),
]  # fmt: skip


def fused(params: list[Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW; for bf16 weights its state is bf16, too.

    On a GPU it is capturable, so that a CUDA graph can capture it, like shoestring's AdamW.
    """
    return torch.optim.AdamW(params, fused=True, capturable=params[0].is_cuda)


def ours(dtype: torch.dtype) -> Makers:
    """Return constructors of shoestring's AdamW by kind of state; the default kind is first."""
    found: Makers = {
        f"shoestring {state}": functools.partial(AdamW, state_format=state) for state in STATE_BYTES
    }
    if dtype == torch.bfloat16:
        found |= {
            f"shoestring 8bit, {weights}": functools.partial(AdamW, weight_rounding=weights)
            for weights in WEIGHTS
        }
    return found


@functools.cache
def bitsandbytes(device: str, name: str = "AdamW8bit") -> Makers:
    """Return {label: constructor} of a bitsandbytes optimizer; {} if it is missing or fails on the device."""
    try:
        import bitsandbytes

        make = getattr(bitsandbytes.optim, name)
        make = functools.partial(make, lr=1e-3, momentum=0.9) if name.startswith("SGD") else make
        stepper(make, [Parameter(torch.ones(8192, device=device))], [torch.ones(8192, device=device)])()
        return {f"bitsandbytes {name}": make}
    except ImportError:
        print("bitsandbytes is not installed")
    # the binary of bitsandbytes may not support this GPU; the remaining timings must continue
    except Exception as error:
        print(f"bitsandbytes is left out: {error}")
    return {}


@functools.cache
def torchao(device: str) -> Makers:
    """Return {label: constructor} of torchao's optimizers, or {} on a GPU or without torchao.

    At their first step, these optimizers call torch.compile, which takes seconds on a CPU and minutes on a
    GPU. They are therefore left out on a GPU.
    """
    if device == "cuda":
        return {}
    try:
        from torchao.optim import AdamW4bit, AdamW8bit

        return {"torchao AdamW8bit": AdamW8bit, "torchao AdamW4bit": AdamW4bit}
    except ImportError:
        print("torchao is not installed")
        return {}


def stepper(make: Maker, params: list[Parameter], grads: list[Tensor]) -> Callable[[], object]:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return make(params).step


def steppers(makers: Makers, params: list[Parameter], grads: list[Tensor]) -> Candidates:
    return {name: stepper(make, params, grads) for name, make in makers.items()}


def tensors(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[list[Parameter], list[Tensor]]:
    """Return `count` parameters of shape `shape`, and their gradients."""
    params = [Parameter(torch.empty(shape, dtype=dtype, device=device).normal_()) for _ in range(count)]
    return params, [torch.empty_like(p).normal_() for p in params]


def state_bytes(step: Any) -> int:
    """Return the bytes of an optimizer's state, given its bound method ``step``.

    Each storage counts once; storages inside tensor subclasses are counted, too.
    """
    found: dict[int, int] = {}

    def add(value: object) -> None:
        if not isinstance(value, Tensor):
            return
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))
            return
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

    for entry in step.__self__.state.values():
        for value in entry.values():
            add(value)
    return sum(found.values())


def streams(param: Tensor, grad: Tensor, size: int) -> Callable[[], None]:
    """Return a function with the memory traffic of an optimizer step with `size` bytes of state."""
    p, state = param.detach().clone(), torch.zeros(size, dtype=torch.uint8, device=param.device)

    def run() -> None:
        p.add_(grad)
        state.add_(1)

    return run


def one_tensor(options: argparse.Namespace, report: Report, size: int, dtype: torch.dtype) -> None:
    device = options.device
    params, grads = tensors(1, (size,), dtype, device)
    makers = ours(dtype) | {"torch fused": fused} | bitsandbytes(device) | torchao(device)
    candidates = steppers(makers, params, grads)
    steps = dict(candidates)
    for state, each in STATE_BYTES.items():
        candidates[f"limit: {state} streams"] = streams(params[0], grads[0], int(each * size))
    if device == "cuda":
        # Number of bytes that a step moves: it reads and writes the weights, reads the gradients, and reads
        # and writes the state.
        moved = int(size * (3 * dtype.itemsize + 2 * STATE_BYTES["8bit"]))
        candidates["limit: copy of the 8bit bytes"] = copy_probe(moved, device)
    times = interleave(candidates, options.repeats, device)
    report.table(f"AdamW, one tensor of {size >> 20} Mi, {str(dtype)[6:]}", times, size / 1e6, "M params/s")
    memory(report, {name: state_bytes(step) / size for name, step in steps.items()}, dtype)


def memory(report: Report, measured: dict[str, float], dtype: torch.dtype) -> None:
    """Print and keep the measured bytes of AdamW's state per parameter, and shoestring's formula for them."""
    rows = []
    print(f"\n  {'bytes of state a parameter':36} {'measured':>9} {'formula':>12}")
    for name, each in measured.items():
        state, _, weights = name.removeprefix("shoestring ").partition(", ")
        formula = STATE_BYTES[state] + 2 * (weights == "remainder") if name.startswith("shoestring") else None
        rows.append({"name": name, "measured": each, "formula": formula})
        print(f"  {name:36} {each:9.4f} {'' if formula is None else f'{formula:.4f}':>12}")
    report.data.setdefault("state_bytes", {})[str(dtype)[6:]] = rows
    report.finish()


def other_rules(options: argparse.Namespace, report: Report) -> None:
    for rule in RULES:
        shape = (512, 512) if options.quick else rule.shape
        params, grads = tensors(1, shape, torch.float32, options.device)
        makers: Makers = {
            f"shoestring {state}": functools.partial(rule.ours, state_format=state) for state in STATE_BYTES
        }
        makers[f"torch {rule.twin}"] = rule.torch
        if rule.bitsandbytes is not None:
            makers |= bitsandbytes(options.device, rule.bitsandbytes)
        times = interleave(steppers(makers, params, grads), options.repeats, options.device)
        title = f"{rule.name}, {' x '.join(map(str, shape))}, float32"
        report.table(title, times, params[0].numel() / 1e6, "M params/s")


def many_tensors(options: argparse.Namespace, report: Report, count: int, each: int) -> None:
    """Time a step over many small tensors; on a GPU also as a CUDA graph, which excludes launch times."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    many, one = tensors(count, (each,), dtype, device), tensors(1, (count * each,), dtype, device)
    candidates: Candidates = {}
    if device == "cuda":
        candidates[f"shoestring 8bit, {count} tensors, graph"] = graphed(stepper(AdamW, *many))
        candidates["shoestring 8bit, one tensor, graph"] = graphed(stepper(AdamW, *one))
        candidates[f"torch fused, {count} tensors, graph"] = graphed(stepper(fused, *many))
    makers = ours(dtype) | {"torch fused": fused} | bitsandbytes(device) | torchao(device)
    candidates |= {f"{name}, {count} tensors": step for name, step in steppers(makers, *many).items()}
    candidates |= {f"{name}, one tensor": step for name, step in steppers(ours(dtype), *one).items()}
    # A step over these tensors takes milliseconds, so many rounds are affordable.
    times = interleave(candidates, max(options.repeats, 3 if options.quick else 20), device)
    report.table(
        f"AdamW, {count} tensors of {each}, {str(dtype)[6:]}", times, count * each / 1e6, "M params/s"
    )


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("optim", options)
    for dtype in (torch.float32, torch.bfloat16):
        size = (1 if options.quick else 64) << 20
        if options.device == "cuda" and not options.quick:
            # 1000 Mi parameters, or as many as fit into GPU memory. All timed optimizers together take about
            # 80 bytes per fp32 parameter.
            size = min(1000 << 20, torch.cuda.mem_get_info()[0] // 100) // 256 * 256
        one_tensor(options, report, size, dtype)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    other_rules(options, report)
    many_tensors(options, report, 100 if options.quick else 1000, 4096)
    report.finish()


if __name__ == "__main__":
    main()

"""A step of AdamW: ours with 8-bit and fp32 state, torch fused, bitsandbytes and torchao, and memory as the limit.

The limits move the same bytes in place, stream after stream, and compute next to nothing: weights read and written,
gradients read, and each moment read and written. On a GPU a copy that moves as many bytes stands beside them.
"""

import argparse
import functools
from collections.abc import Callable

import torch
from common import Candidates, Report, arguments, copy_probe, graphed, interleave
from torch import Tensor
from torch.nn import Parameter

from shoestring.optim import AdamW

Maker = Callable[[list[Parameter]], torch.optim.Optimizer]


@functools.cache
def peers(device: str) -> dict[str, Maker]:
    """Those that are installed and can step here. On a GPU torchao compiles a kernel for each shape, for minutes."""
    found: dict[str, Maker] = {}
    try:
        import bitsandbytes

        stepper(bitsandbytes.optim.AdamW8bit, [torch.ones(8192, device=device)])()
        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    except ImportError:
        print("bitsandbytes is not installed")
    except Exception as error:  # its binary may lack this GPU; that must not cost our figures
        print(f"bitsandbytes is left out: {error}")
    if device == "cuda":
        return found
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = AdamW8bit
    except ImportError:
        print("torchao is not installed")
    return found


def fused(params: list[Parameter]) -> torch.optim.Optimizer:
    """torch's; bf16 weights have bf16 state. On a GPU one that a graph can capture, as ours can."""
    return torch.optim.AdamW(params, fused=True, capturable=params[0].is_cuda)


def stepper(make: Maker, grads: list[Tensor]) -> Callable[[], object]:
    params = [Parameter(torch.empty_like(g).normal_()) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return make(params).step


def streams(param: Tensor, grad: Tensor, moment: torch.dtype) -> Callable[[], None]:
    """The traffic of a step."""
    m, v = (torch.zeros(param.shape, dtype=moment, device=param.device) for _ in range(2))
    p = param.clone()

    def run() -> None:
        p.add_(grad)
        m.add_(1)
        v.add_(1)

    return run


def one_tensor(options: argparse.Namespace, report: Report, size: int, dtype: torch.dtype) -> None:
    device = options.device
    grads = [torch.empty(size, dtype=dtype, device=device).normal_()]
    makers: dict[str, Maker] = {
        "shoestring 8bit": AdamW,
        "shoestring fp32": lambda p: AdamW(p, state="fp32"),
        "torch fused": fused,
        **peers(device),
    }
    candidates: Candidates = {name: stepper(make, grads) for name, make in makers.items()}
    candidates["limit: 8bit streams"] = streams(grads[0], grads[0], torch.uint8)
    candidates["limit: fp32 streams"] = streams(grads[0], grads[0], torch.float32)
    if device == "cuda":
        moved = int(size * (3 * dtype.itemsize + 4 * 260 / 256))  # weights twice, gradients; moments and their scales
        candidates["limit: copy of the 8bit bytes"] = copy_probe(moved, device)
    times = interleave(candidates, options.repeats, device)
    report.table(f"one tensor of {size >> 20} Mi, {str(dtype)[6:]}", times, size / 1e6, "M params/s")


def many_tensors(options: argparse.Namespace, report: Report, count: int, each: int) -> None:
    """On a GPU as a graph, which leaves the launches out, and as it is called."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    many = [torch.empty(each, dtype=dtype, device=device).normal_() for _ in range(count)]
    one = [torch.empty(count * each, dtype=dtype, device=device).normal_()]
    candidates: Candidates = {}
    if device == "cuda":
        candidates[f"shoestring 8bit, {count} tensors, graph"] = graphed(stepper(AdamW, many))
        candidates["shoestring 8bit, one tensor, graph"] = graphed(stepper(AdamW, one))
        candidates[f"torch fused, {count} tensors, graph"] = graphed(stepper(fused, many))
    else:
        candidates["shoestring 8bit, one tensor"] = stepper(AdamW, one)
    candidates[f"shoestring 8bit, {count} tensors"] = stepper(AdamW, many)
    candidates[f"torch fused, {count} tensors"] = stepper(fused, many)
    if device == "cuda":
        candidates |= {f"{name}, {count} tensors": stepper(make, many) for name, make in peers(device).items()}
    times = interleave(candidates, 4 * options.repeats, device)
    report.table(f"{count} tensors of {each}, {str(dtype)[6:]}", times, count * each / 1e6, "M params/s")


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("adamw", options)
    for dtype in (torch.float32, torch.bfloat16):
        size = (1 if options.quick else 64 if dtype == torch.float32 else 32) << 20
        if options.device == "cuda" and not options.quick:
            # A thousand million, or as many as fit: some 90 bytes a parameter over all candidates, with fp32 weights.
            size = min(1000 << 20, torch.cuda.mem_get_info()[0] // 100) // 256 * 256
        one_tensor(options, report, size, dtype)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    many_tensors(options, report, 100 if options.quick else 1000, 4096)
    report.finish()


if __name__ == "__main__":
    main()

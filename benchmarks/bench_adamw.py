"""A step of AdamW: ours with 8-bit and fp32 state, torch fused, bitsandbytes and torchao, and memory as the limit.

The limits move the same bytes in place, stream after stream, and compute next to nothing: weights read and written,
gradients read, and each moment read and written.
"""

from collections.abc import Callable

import torch
from common import Report, arguments, interleave
from torch import Tensor
from torch.nn import Parameter

from shoestring.optim import AdamW


def peers() -> dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]]:
    """Those that are installed."""
    found = {}
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    except ImportError:
        print("bitsandbytes is not installed")
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = AdamW8bit
    except ImportError:
        print("torchao is not installed")
    return found


def streams(param: Tensor, grad: Tensor, moment: torch.dtype) -> Callable[[], None]:
    """The traffic of a step."""
    m, v = (torch.zeros(param.shape, dtype=moment) for _ in range(2))
    p = param.clone()

    def run() -> None:
        p.add_(grad)
        m.add_(1)
        v.add_(1)

    return run


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    report = Report("adamw", options)

    def stepper(make: Callable[[list[Parameter]], torch.optim.Optimizer], grads: list[Tensor]) -> Callable[[], object]:
        params = [Parameter(torch.randn_like(g)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        return make(params).step

    for dtype in (torch.float32, torch.bfloat16):
        size = (1 if options.quick else 64 if dtype == torch.float32 else 32) << 20
        grads = [torch.randn(size).to(dtype)]
        makers = {
            "shoestring 8bit": AdamW,
            "shoestring fp32": lambda p: AdamW(p, state="fp32"),
            "torch fused": lambda p: torch.optim.AdamW(p, fused=True),  # bf16 weights: bf16 state
            **peers(),
        }
        candidates = {name: stepper(make, grads) for name, make in makers.items()}
        candidates["limit: 8bit streams"] = streams(grads[0], grads[0], torch.uint8)
        candidates["limit: fp32 streams"] = streams(grads[0], grads[0], torch.float32)
        times = interleave(candidates, options.repeats)
        report.table(f"one tensor of {size >> 20} Mi, {str(dtype)[6:]}", times, size / 1e6, "M params/s")

    count, each = (100, 4096) if options.quick else (1000, 4096)
    many = [torch.randn(each) for _ in range(count)]
    candidates = {
        "shoestring 8bit, one tensor": stepper(AdamW, [torch.randn(count * each)]),
        f"shoestring 8bit, {count} tensors": stepper(AdamW, many),
        f"torch fused, {count} tensors": stepper(lambda p: torch.optim.AdamW(p, fused=True), many),
    }
    times = interleave(candidates, 4 * options.repeats)
    report.table(f"{count} tensors of {each}", times, count * each / 1e6, "M params/s")
    report.finish()


if __name__ == "__main__":
    main()

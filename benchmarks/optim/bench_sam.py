"""Time training steps of SAM against those of its base optimizer. Each round takes ten steps.

A step of SAM computes forward and backward twice. With interval=10, one step of ten does so.
"""

import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring.optim import SAM, AdamW


def model_of(width: int, device: str) -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers).to(device)


def ten_steps(width: int, rows: int, device: str, interval: int | None) -> Callable[[], None]:
    """Return ten steps of SAM, or of its base optimizer if interval is None."""
    model, x = model_of(width, device), torch.randn(rows, width, device=device)
    optimizer = (
        AdamW(model.parameters()) if interval is None else SAM(model.parameters(), AdamW, interval=interval)
    )

    def run() -> None:
        for _ in range(10):
            model(x).square().mean().backward()
            if isinstance(optimizer, SAM) and optimizer.first_step(zero_grad=True):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("sam", options)
    width, rows = (64, 32) if options.quick else (512, 512)
    candidates: Candidates = {
        "shoestring SAM, interval=10": ten_steps(width, rows, options.device, 10),
        "shoestring SAM": ten_steps(width, rows, options.device, 1),
        "AdamW, the base optimizer": ten_steps(width, rows, options.device, None),
    }
    times = interleave(candidates, options.repeats, options.device)
    report.table(f"ten steps, 4 layers of {width}, {rows} rows", times, 10.0, "steps/s")
    base = times["AdamW, the base optimizer"]
    for name in list(times)[:2]:
        ratio = statistics.median(a / b for a, b in zip(times[name], base, strict=True))
        print(f"{name}: {ratio:.3f} of the base optimizer's time")
    report.finish()


if __name__ == "__main__":
    main()

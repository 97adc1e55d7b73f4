"""Time a step of several micro-batches with and without GradientNoise, and the norms that it adds.

GradientNoise takes the norm of each micro-batch's gradients. The limit is the time of one read of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring.optim import AdamW, GradientNoise

MICRO_BATCHES = 4


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("gradient_noise", options)
    device = options.device
    width, rows = (256, 64) if options.quick else (2048, 512) if device == "cpu" else (4096, 8192)

    def candidate(measures: bool) -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(device)
        optimizer = AdamW(model.parameters(), lr=1e-6)
        noise = GradientNoise(optimizer) if measures else None
        x = torch.randn(rows, width, device=device)

        def step() -> None:
            for part in range(MICRO_BATCHES):
                loss = model(x).square().mean() / MICRO_BATCHES
                if part + 1 < MICRO_BATCHES:
                    with optimizer.accumulate():
                        loss.backward()
                else:
                    loss.backward()
            if noise is not None:
                noise.update(rows=rows, micro_batches=MICRO_BATCHES)
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    model, plain = candidate(False)
    _, measured = candidate(True)
    candidates: Candidates = {
        "shoestring, without": plain,
        "shoestring, GradientNoise": measured,
    }
    times = interleave(candidates, options.repeats, device)
    report.table(
        f"A step of 8 layers of {width}, {MICRO_BATCHES} micro-batches of {rows} rows", times, 1.0, "steps/s"
    )

    gradients = [torch.randn_like(p) for p in model.parameters()]
    alone: Candidates = {
        "shoestring, norms": lambda: torch.ops.shoestring.foreach_norm(gradients),
        "limit: sum": lambda: [g.sum() for g in gradients],
    }
    moved = sum(g.numel() * g.element_size() for g in gradients)
    norms = interleave(alone, options.repeats, device)
    report.table("The norms of one micro-batch", norms, moved / 1e9, "GB/s")
    # Each micro-batch takes one norm, and the sum of all takes another.
    added = (MICRO_BATCHES + 1) * statistics.median(norms["shoestring, norms"])
    share = added / statistics.median(times["shoestring, without"])
    print(f"\nThe norms take {100 * share:.2f} % of the step without them.")
    report.finish()


if __name__ == "__main__":
    main()

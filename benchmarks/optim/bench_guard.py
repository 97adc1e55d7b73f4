"""Time a training step with and without Guard, and the pass over the gradients that it adds.

The share of the step is what the guard costs: the guard reads each gradient once, so the limit is the time of the
sum of the gradients' elements.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from benchmarks.common import Candidates, Report, arguments, interleave
from shoestring.optim import AdamW, Guard


def main() -> None:
    options = arguments(__doc__.splitlines()[0], ("cpu", "cuda"))
    report = Report("guard", options)
    device = options.device
    width, tokens = (256, 64) if options.quick else (2048, 512) if device == "cpu" else (4096, 8192)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(device)
    x = torch.randn(tokens, width, device=device)
    optimizer = AdamW(model.parameters(), lr=1e-6)

    def gradients() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    def plain() -> None:
        gradients()
        optimizer.step()

    guards = {
        "shoestring, skip": Guard(optimizer),
        "shoestring, skip and spikes": Guard(optimizer, spike=6.0),
        "shoestring, rollback every 100": Guard(optimizer, on="rollback", spike=6.0),
    }
    candidates: Candidates = {"shoestring, without a guard": plain}
    for name, guard in guards.items():
        candidates[name] = lambda guard=guard: guard.step(gradients())
    times = interleave(candidates, options.repeats, device)
    report.table(f"A step of 8 layers of {width}, {tokens} rows", times, 1.0, "steps/s")

    loss = gradients().detach()
    guard = guards["shoestring, skip and spikes"]
    grads = [p.grad for p in model.parameters() if p.grad is not None]

    def judge() -> None:
        guard._core.review()
        guard.watch(loss)
        guard._core.record(guard._core.judge(grads))

    alone: Candidates = {"shoestring, judging": judge, "limit: sum": lambda: [g.sum() for g in grads]}
    moved = sum(g.numel() * g.element_size() for g in grads)
    judged = interleave(alone, options.repeats, device)
    report.table("Judging alone", judged, moved / 1e9, "GB/s")
    step = statistics.median(times["shoestring, without a guard"])
    share = statistics.median(judged["shoestring, judging"]) / step
    print(f"\nJudging takes {100 * share:.2f} % of the step without a guard.")
    report.finish()


if __name__ == "__main__":
    main()

"""Compare the losses of shoestring's training with eager PyTorch's, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.step.worker import Failed, Worker

SEEDS = (0, 1, 2)
# Each row: the candidate whose losses are compared with eager PyTorch's, and arguments of ``cases.make``.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager PyTorch, weights changed by one rounding": ("eager", {"disturb": True}),
    "shoestring, AdamW with fp32 state": ("ours", {"state_format": "fp32"}),
    "shoestring, AdamW with 8-bit state": ("ours", {"state_format": "8bit"}),
}


def compare_losses(start: Callable[[str], Worker], steps: int) -> list[dict[str, Any]]:
    """Train on 16 batches in turn, and print the largest relative difference of a loss from eager PyTorch's.

    The first row is the yardstick: two runs of eager PyTorch that differ by the rounding of their first
    weights.

    Args:
        start: starts the worker of a candidate.
        steps: number of steps of each run.
    """
    workers = {name: start(name) for name in ("eager", "ours")}
    differences: dict[str, list[float]] = {name: [] for name in ROWS}
    ends = []
    try:
        for seed in SEEDS:
            common = {"steps": steps, "seed": seed, "count": 16}
            reference = workers["eager"].ask("losses", **common)
            ends.append(f"{reference[0]:.3f} to {reference[-1]:.3f}")
            for name, (candidate, arguments) in ROWS.items():
                losses = workers[candidate].ask("losses", **common, **arguments)
                difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference))
                differences[name].append(difference)
    except Failed as error:
        print(f"  failed: {error}")
        return [{"name": "failed", "reason": str(error)}]
    finally:
        for worker in workers.values():
            worker.close()
    print(f"  eager PyTorch's losses: {', '.join(ends)}")
    print(f"  {'largest relative difference, by seed':50}" + "".join(f"{seed:>12}" for seed in SEEDS))
    for name, found in differences.items():
        print(f"  {name:50}" + "".join(f"{difference:12.1e}" for difference in found))
    return [{"name": name, **{f"seed {s}": d for s, d in zip(SEEDS, found)}} for name, found in differences.items()]  # fmt: skip

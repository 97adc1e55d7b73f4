"""Compare the plan of a small model with all other ways to train it that fit: brute force, as measured.

A way is a micro-batch, what all blocks do with their activations, a format of the optimizer's state and a precision. All
ways whose predicted memory is within the budget, and the plan, train some batches in turns, in a random order. "times
ours" is the median over the turns of the time of a way divided by that of the plan. "fastest" has the fastest batch of
each instead, since other programs of a machine only add to a time. The aim is at least 0.95 for each way, and 0.98 for
plain training.

    python -m benchmarks.bench_plans [--only llama|layers]
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoestring
from benchmarks.common import Report, arguments
from shoestring.planning.trial import run_trial
from shoestring.training.config import PRESETS
from shoestring.training.run.models import build_preset

BATCH, TOKENS, WORDS = 8, 256, 1000
BESIDE = 2**24  # bytes that a process may take between two plans
SHOWN = 3  # the fastest ways in a table
PLAIN = {"micro_batch": BATCH, "activations": "keep", "optimizer_state": "8bit", "precision": "fp32"}
Example = Callable[[int], Tensor]


def llama() -> tuple[nn.Module, Example]:
    model = build_preset(PRESETS["tiny"], WORDS, TOKENS, 0)

    def loss(rows: int) -> Tensor:
        tokens = torch.arange(rows * TOKENS).view(rows, TOKENS) % WORDS
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return model, loss


def layers() -> tuple[nn.Module, Example]:
    width = 512
    blocks = (
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        for _ in range(6)
    )
    model = nn.Sequential(nn.Linear(16, width), nn.Sequential(*blocks), nn.Linear(width, 8))
    return model, lambda rows: model(torch.ones(rows, TOKENS, 16)).square().mean()


MODELS = {"llama": llama, "layers": layers}


def ways(freedom: str) -> list[dict[str, Any]]:
    """Return the choices of all ways, plain training first."""
    precisions = ["fp32"] if freedom == "exact" else ["fp32", "bf16"]
    found = [
        {"micro_batch": rows, "activations": kept, "optimizer_state": state, "precision": precision}
        for rows, kept, state, precision in itertools.product(
            (8, 4, 2, 1), ("keep", "recompute"), ("8bit", "fp32"), precisions
        )
    ]
    assert found[0] == PLAIN
    return found


def compare(name: str, freedom: str, share: float | None, report: Report, repeats: int) -> None:
    """Compare the plan for a budget with the ways that fit.

    ``share`` is the place of the budget between the least memory and that of the fastest plan; None is no budget.
    """
    torch.manual_seed(0)
    model, example = MODELS[name]()
    arguments: dict[str, Any] = {"example": example, "batch_size": BATCH, "freedom": freedom}
    if share is not None:
        found = shoestring.plan_training(model, measure=False, **arguments).frontier
        low, high = found[0]["peak_bytes"], found[-1]["peak_bytes"]
        arguments["device_memory"] = int(low + share * (high - low)) + BESIDE
    plans = {"the plan": shoestring.plan_training(model, **arguments)}
    for way in ways(freedom):
        try:
            plan = shoestring.plan_training(model, measure=False, fixed=way, **arguments)
        except ValueError:
            continue  # it does not fit
        plans["plain" if way == PLAIN else " ".join(map(str, way.values()))] = plan
    times: dict[str, list[float]] = {key: [] for key in plans}
    order = random.Random(0)
    for _ in range(repeats):
        for key in order.sample(list(plans), len(plans)):
            applied = plans[key].apply(model)
            times[key].append(run_trial(plans[key], model, example, shoestring.optim.AdamW).seconds)
            applied.undo()
    fastest = {key: min(seconds) / min(times["the plan"]) for key, seconds in times.items()}
    ratios = {key: fastest[key] for key in plans if key != "the plan"}
    shown = sorted(ratios, key=lambda key: ratios[key])[:SHOWN]
    shown += ["plain"] if "plain" in ratios and "plain" not in shown else []
    budget = "no budget" if share is None else f"a budget of {arguments['device_memory'] / 2**20:.0f} MiB"
    title = f"{name}, {freedom}, {budget}: the plan ({str(plans['the plan']).splitlines()[0]}), and {len(ratios)} ways"
    shown.insert(0, "the plan")
    columns = {key: {"fastest": fastest[key]} for key in shown}
    report.table(title, {key: times[key] for key in shown}, BATCH, "rows/s", columns)


def more_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(MODELS), help="one of the models")


def main() -> None:
    options = arguments(__doc__.partition("\n")[0], more=more_arguments)
    report = Report("plans", options)
    shoestring.host_allocator()
    shares = [0.4] if options.quick else [None, 0.4]
    freedoms = ["exact"] if options.quick else ["exact", "rounding"]
    names = [options.only] if options.only else list(MODELS)[: 1 if options.quick else None]
    for name, freedom, share in itertools.product(names, freedoms, shares):
        compare(name, freedom, share, report, 1 if options.quick else options.repeats)
    report.finish()


if __name__ == "__main__":
    main()

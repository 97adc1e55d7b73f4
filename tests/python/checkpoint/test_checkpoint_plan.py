"""Compare checkpoint_plan with exhaustive search over an independent simulation in exact fractions."""

import itertools
import random
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from shoestring.checkpoint.planner import (
    CheckpointPlan,
    PlanBlock,
    PlanChoice,
    checkpoint_frontier,
    checkpoint_plan,
    simulate_checkpoint_plan,
)

MODELS = range(12)


def simulate(
    blocks: list[PlanBlock],
    plan: tuple[int, ...],
    budget: int,
    out: int,
    back: int,
    prefetch: int,
    share: float,
) -> tuple[int, Fraction]:
    """Return a plan's peak memory in bytes and its time, simulated as the planner's documentation says.

    The simulation runs the forward pass block by block, and then the backward pass.
    """
    chosen = [block.choices[c] for block, c in zip(blocks, plan, strict=True)]
    now, held, backlog, peak = Fraction(0), 0, Fraction(0), 0
    for block, choice in zip(blocks, chosen, strict=True):
        own = max(choice.forward_bytes, choice.bytes + choice.link_bytes)
        wait = max(Fraction(0), min(backlog, held + backlog + own - budget) / out) if backlog else Fraction(0)
        now += wait
        backlog -= wait * out
        peak = max(peak, held + own + backlog)
        forward = Fraction(block.forward_seconds) + Fraction(share) * choice.link_bytes / out
        now += forward
        backlog = max(Fraction(0), backlog - forward * out) + choice.link_bytes
        held += choice.bytes
    now += backlog / out if backlog else 0
    # started[i] is the time at which the backward of block i starts. The entries after the last block hold
    # the time at which the whole backward pass starts.
    started = [now] * (len(blocks) + prefetch + 1)
    copied = now
    end = now
    for i in reversed(range(len(blocks))):
        held -= chosen[i].bytes
        if chosen[i].link_bytes:
            copied = max(copied, started[i + prefetch]) + Fraction(chosen[i].link_bytes) / back
            end = max(end, copied)
        started[i] = end
        end += Fraction(blocks[i].backward_seconds) + Fraction(chosen[i].extra_seconds)
        end += Fraction(share) * chosen[i].link_bytes / back
        own = max(chosen[i].backward_bytes, chosen[i].bytes + chosen[i].link_bytes)
        left = sum(block.gradient_bytes for block in blocks[i + 1 :])
        peak = max(peak, held + own + left + sum(c.link_bytes for c in chosen[max(0, i - prefetch) : i]))
    return peak, end


def random_blocks(rng: random.Random) -> list[PlanBlock]:
    blocks = []
    for _ in range(rng.randint(3, 5)):
        # Times are multiples of 1/8 s, which floating-point numbers represent exactly.
        size, forward = (
            rng.randint(20, 120),
            rng.randint(1, 9) / 8,
        )
        least = rng.randint(1, size // 4)
        forward_bytes, backward_bytes = rng.randint(size // 2, size * 2), rng.randint(size // 2, size * 2)
        peaks = {"forward_bytes": forward_bytes, "backward_bytes": backward_bytes}
        blocks.append(
            PlanBlock(
                forward,
                rng.randint(1, 16) / 8,
                [
                    PlanChoice("keep", size, **peaks),
                    PlanChoice("recompute", least, forward, **peaks),
                    PlanChoice("offload", rng.choice([0, least]), 0.0, size - least, **peaks),
                    PlanChoice("recompute, input offloaded", 0, forward, least, **peaks),
                ][: rng.randint(2, 4)],
                rng.choice([0, rng.randint(1, 100)]),
            )
        )
    return blocks


def every_plan(blocks: list[PlanBlock]) -> itertools.product:
    return itertools.product(*(range(len(block.choices)) for block in blocks))


@pytest.mark.parametrize("model", MODELS)
def test_best_of_all_plans(model: int, seed: int) -> None:
    rng = random.Random(f"{seed} {model}")
    blocks, prefetch = random_blocks(rng), rng.randint(1, 4)
    out, back = rng.choice([16, 64, 256]), rng.choice([16, 64, 256])
    share = rng.choice([0.0, 0.25, 0.5, 1.0])
    options = {
        "out_bytes_per_second": out,
        "in_bytes_per_second": back,
        "copy_share": share,
        "prefetch": prefetch,
    }
    floor = min(simulate(blocks, plan, 0, out, back, prefetch, share)[0] for plan in every_plan(blocks))
    with pytest.raises(
        RuntimeError, match=rf"checkpoint_plan: budget: expected at least {floor} bytes, received {floor - 1}"
    ):
        checkpoint_plan(blocks, floor - 1, **options)
    most = int(simulate(blocks, (0,) * len(blocks), 10**9, out, back, prefetch, share)[0])
    for budget in (floor, (3 * floor + most) // 4, (floor + most) // 2, most):
        results = {
            plan: simulate(blocks, plan, budget, out, back, prefetch, share) for plan in every_plan(blocks)
        }
        for plan, (peak, seconds) in results.items():
            predicted = simulate_checkpoint_plan(blocks, plan, budget, **options)
            assert abs(predicted.peak_bytes - peak) <= 1 and predicted.seconds == pytest.approx(
                float(seconds), abs=1e-9
            )
        best = min(seconds for peak, seconds in results.values() if peak <= budget)
        found = checkpoint_plan(blocks, budget, **options)
        assert found.seconds == pytest.approx(float(best), abs=1e-9) and found.least_seconds == found.seconds
        assert found.peak_bytes <= budget and abs(found.peak_bytes - results[found.choices][0]) <= 1
        assert found.names == tuple(
            block.choices[c].name for block, c in zip(blocks, found.choices, strict=True)
        )


@pytest.mark.parametrize("model", range(24))
def test_frontier_has_the_best_plan_of_every_budget(model: int, seed: int) -> None:
    rng = random.Random(f"{seed} {model}")
    blocks, prefetch = random_blocks(rng), rng.randint(1, 4)
    copies = model % 2 == 0
    if not copies:
        blocks = [replace(block, choices=[c for c in block.choices if not c.link_bytes]) for block in blocks]
    out, back = rng.choice([16, 64, 256]), rng.choice([16, 64, 256])
    options: dict[str, Any] = {"prefetch": prefetch}
    if copies:
        options |= {"out_bytes_per_second": out, "in_bytes_per_second": back}
    frontier = checkpoint_frontier(blocks, **options)
    peaks, seconds = [plan.peak_bytes for plan in frontier], [plan.seconds for plan in frontier]
    assert peaks == sorted(set(peaks)) and seconds == sorted(set(seconds), reverse=True)
    worst = 1.0
    for i, plan in enumerate(frontier):
        # The next plan of the frontier needs its own peak, so up to there no plan is faster.
        budget = peaks[i + 1] - 1 if i + 1 < len(peaks) else 10**6
        best = checkpoint_plan(blocks, budget, **options)
        assert best.seconds <= plan.seconds + 1e-9
        worst = max(worst, plan.seconds / best.seconds)
        within = checkpoint_plan(blocks, plan.peak_bytes, **options)
        assert within.seconds <= plan.seconds + 1e-9  # the plan exists
        assert plan.names == tuple(
            block.choices[c].name for block, c in zip(blocks, plan.choices, strict=True)
        )
    with pytest.raises(RuntimeError, match=f"expected at least {peaks[0]} bytes"):
        checkpoint_plan(blocks, peaks[0] - 1, **options)
    # Without copies the frontier is exact. With copies, forward waits as it would for one of 9 budgets.
    assert worst <= (1.25 if copies else 1 + 1e-12), worst


def alike(count: int, budget: float, bandwidth: float, prefetch: int = 1) -> CheckpointPlan:
    peaks = {"forward_bytes": 130_000_000, "backward_bytes": 160_000_000}
    block = PlanBlock(
        0.010,
        0.020,
        [
            PlanChoice("keep", 100_000_000, **peaks),
            PlanChoice("recompute", 4_000_000, 0.010, **peaks),
            PlanChoice("attention", 12_000_000, 0.007, **peaks),
            PlanChoice("offload", 0, 0.0, 100_000_000, **peaks),
            PlanChoice("recompute, input offloaded", 0, 0.010, 4_000_000, **peaks),
        ],
    )
    budget = int(count * 100_000_000 * budget) + 60_000_000
    return checkpoint_plan(
        [block] * count,
        budget,
        out_bytes_per_second=bandwidth,
        in_bytes_per_second=bandwidth,
        prefetch=prefetch,
    )


@pytest.mark.parametrize("budget", [0.08, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("bandwidth", [2e9, 1e10])
def test_two_hundred_blocks(budget: float, bandwidth: float) -> None:
    start = time.process_time()
    plan = alike(200, budget, bandwidth)
    assert plan.least_seconds == plan.seconds
    assert time.process_time() - start < 3  # planning 200 blocks takes about 0.4 s on an idle machine


@pytest.mark.parametrize("chain", range(3))
def test_the_smallest_budget_has_a_plan(chain: int, seed: int) -> None:
    """Most partial plans of many different blocks are discarded, and with them all that fit into the smallest budget."""
    rng = random.Random(f"{seed} {chain}")
    blocks = []
    for _ in range(24):
        size, forward = rng.randint(20_000, 120_000), rng.randint(1, 9) / 8
        least = rng.randint(1000, size // 4)
        peaks = {name: rng.randint(size // 2, 2 * size) for name in ("forward_bytes", "backward_bytes")}
        choices = [
            PlanChoice("keep", size, **peaks),
            PlanChoice("recompute", least, forward, **peaks),
            PlanChoice("offload", rng.choice([0, least]), 0.0, size - least, **peaks),
            PlanChoice("recompute, input offloaded", 0, forward, least, **peaks),
        ]
        blocks.append(PlanBlock(forward, rng.randint(1, 16) / 8, choices, rng.choice([0, least])))
    link: dict[str, Any] = {"out_bytes_per_second": 16_000, "in_bytes_per_second": 64_000, "prefetch": 2}
    first, *rest = checkpoint_frontier(blocks, **link)
    found = checkpoint_plan(blocks, first.peak_bytes, **link)
    assert found.peak_bytes == first.peak_bytes and found.least_seconds <= found.seconds <= first.seconds
    assert all(plan.seconds < first.seconds for plan in rest)
    with pytest.raises(RuntimeError, match=f"expected at least {first.peak_bytes} bytes"):
        checkpoint_plan(blocks, first.peak_bytes - 1, **link)


def test_wide_problem_states_how_far_off_it_can_be() -> None:
    plan = alike(100, 0.08, 2e9, prefetch=2)
    assert plan.least_seconds < plan.seconds < plan.least_seconds * 1.02


def test_enough_memory_keeps_everything() -> None:
    assert set(alike(24, 2.0, 1e6).names) == {"keep"}


def test_no_blocks() -> None:
    assert checkpoint_plan([], 0) == CheckpointPlan((), (), (), 0, 0.0, 0.0)


def test_what_may_be_on_its_way() -> None:
    block = PlanBlock(1, 1, [PlanChoice("offload", 5, 0, 20, 30, 30)])
    plan = simulate_checkpoint_plan([block] * 4, [0] * 4, 42, out_bytes_per_second=1, in_bytes_per_second=1)
    # In backward, the three earlier blocks hold 15 bytes, the last block needs 30 bytes, and 20 offloaded
    # bytes are read back. These 65 bytes exceed the budget of 42.
    assert plan.peak_bytes == 65
    # A block's forward needs 30 of the 42 bytes, so 12 bytes are free for pending copies. Each earlier block
    # holds 5 of these 12 bytes. The number of free bytes is never below 0.
    assert plan.pending_bytes == (
        12,
        7,
        2,
        0,
    )
    plan = simulate_checkpoint_plan(
        [block] * 4, [0] * 4, 1000, out_bytes_per_second=100, in_bytes_per_second=1
    )
    # Pending copies may raise the peak of 65 bytes by 5% to 68 bytes, so 68 - 30 = 38 bytes are free for
    # them.
    assert plan.pending_bytes == (38, 33, 28, 23)


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [
        (PlanBlock(1, 1, []), {}, "choices: expected 1 or more of each block, received 0"),
        (
            PlanBlock(-1, 1, [PlanChoice("keep")]),
            {},
            "forward_seconds of block 0: expected 0 to 4500 seconds, received -1",
        ),
        (
            PlanBlock(1, 1, [PlanChoice("keep", -5)]),
            {},
            r"bytes of block 0: expected 0 to 2\^52 bytes, received -5",
        ),
        (
            PlanBlock(1, 1, [PlanChoice("offload", 0, 0, 5)]),
            {},
            "link_bytes of block 0: expected bandwidths above 0, received 0",
        ),
        (
            PlanBlock(1, 1, [PlanChoice("keep")]),
            {"prefetch": 5},
            "prefetch: expected 1 to 4 blocks, received 5",
        ),
        (
            PlanBlock(1, 1, [PlanChoice("keep")]),
            {"copy_share": 1.5},
            "copy_share: expected 0 to 1, received 1.5",
        ),
    ],
)
def test_arguments(block: PlanBlock, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        checkpoint_plan([block], 100, **options)


def test_simulated_plan_has_to_name_choices() -> None:
    block = PlanBlock(1, 1, [PlanChoice("keep", 5)])
    with pytest.raises(RuntimeError, match="choices: expected one for each of 1 blocks, received 0"):
        torch.ops.shoestring.simulate_checkpoint_plan(
            [1.0], [1.0], [1], [5], [0.0], [0], [0], [0], [0], [], budget=5
        )
    with pytest.raises(RuntimeError, match="choices: expected 0 to 0 for block 0, received 1"):
        torch.ops.shoestring.simulate_checkpoint_plan(
            [1.0], [1.0], [1], [5], [0.0], [0], [0], [0], [0], [1], budget=5
        )
    assert simulate_checkpoint_plan([block], [0], 4).peak_bytes == 5

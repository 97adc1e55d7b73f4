"""Compare the planner of checkpoints with HiGHS, which solves the same problem as a mixed-integer program.

The chains are too long for a search of all plans. The program has a binary variable for each treatment of a block. Each
maximum of times is a variable that is at least as large as each of its terms, and each peak is a limit by the budget.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from shoestring.checkpoint.planner import PlanBlock, PlanChoice, checkpoint_frontier, checkpoint_plan

highspy = pytest.importorskip("highspy")

BUDGETS = 5
# The program admits errors of 1e-6 in each constraint and each treatment. Times of plans are multiples of 2^-7 s.
TOLERANCE = 1e-4


def drawn_chain(rng: random.Random, copies: bool) -> list[PlanBlock]:
    """Return a chain of different blocks. Few bytes make few states, so that the whole frontier is found."""
    blocks = []
    for _ in range(rng.randint(6, 10) if copies else rng.randint(15, 30)):
        size, forward = rng.randint(4, 12), rng.randint(1, 9) / 8
        least, most = rng.randint(1, size // 3), rng.randint(size // 2, size)
        peaks = {name: rng.randint(size // 2, 2 * size) for name in ("forward_bytes", "backward_bytes")}
        choices = [
            PlanChoice("keep", size, **peaks),
            PlanChoice("recompute", least, forward, **peaks),
            PlanChoice("keep attention", rng.randint(least, most), rng.randint(1, 8) * forward / 8, **peaks),
            PlanChoice("offload", rng.choice([0, least]), 0.0, size - least, **peaks)
            if copies
            else PlanChoice("keep products", most, forward / 8, **peaks),
        ]
        gradient = rng.choice([0, rng.randint(1, 4)])
        blocks.append(PlanBlock(forward, rng.randint(1, 16) / 8, choices, gradient))
    return blocks


def least_seconds(blocks: list[PlanBlock], budget: int, link: dict[str, Any]) -> float | None:
    """Return the time of the fastest plan within a budget, found by HiGHS, or None if no plan fits."""
    solver = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("random_seed", 0)):
        solver.setOptionValue(name, value)
    prefetch, share = link.get("prefetch", 1), link.get("copy_share", 0.0)
    out_rate, in_rate = link.get("out_bytes_per_second", 1.0), link.get("in_bytes_per_second", 1.0)
    # The times at which forward and its copies end, and the time from the start of a block's backward to the end.
    compute = out = rest = 0.0
    # The times from the start of the copies back to the end, that of the last block first.
    arrivals: list[Any] = [0.0] * prefetch
    links: list[Any] = [0] * prefetch
    held: Any = 0

    def latest(*times: Any) -> Any:
        variable = solver.addVariable(0.0)
        for each in times:
            solver.addConstr(variable - each >= 0)
        return variable

    for i, block in enumerate(blocks):
        own = [solver.addBinary() for _ in block.choices]
        solver.addConstr(solver.qsum(own) == 1)

        def total(values: list[Any], own: list[Any] = own) -> Any:
            return solver.qsum(x * value for x, value in zip(own, values, strict=True))

        copied = total([choice.link_bytes for choice in block.choices])
        forward = total([max(c.forward_bytes, c.bytes + c.link_bytes) for c in block.choices])
        backward = total([max(c.backward_bytes, c.bytes + c.link_bytes) for c in block.choices])
        left = sum(later.gradient_bytes for later in blocks[i + 1 :])
        solver.addConstr(held + forward <= budget)
        solver.addConstr(held + backward + solver.qsum(links) <= budget - left)
        # Bytes of earlier blocks that wait for their copy, which is out - start seconds long, need to fit.
        start = latest(compute, out - (budget - held - forward) * (1 / out_rate))
        compute = start + block.forward_seconds + copied * (share / out_rate)
        out = latest(out, compute) + copied * (1 / out_rate)
        extra = total([choice.extra_seconds for choice in block.choices])
        rest = latest(block.backward_seconds + extra + copied * (share / in_rate) + rest, arrivals[-1])
        arrivals = [
            latest(rest, arrivals[0]) + copied * (1 / in_rate),
            *(latest(each, rest) for each in arrivals[:-1]),
        ]
        links = [copied, *links[:-1]]
        held = held + total([choice.bytes for choice in block.choices])
    solver.minimize(out + arrivals[0])
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    seconds: float = solver.getInfo().objective_function_value
    return seconds


def smallest_budget(blocks: list[PlanBlock], link: dict[str, Any]) -> int:
    """Return the smallest budget with a plan, which the error for a budget of 0 says."""
    with pytest.raises(RuntimeError) as caught:
        checkpoint_plan(blocks, 0, **link)
    found = re.search(r"expected at least (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("copies", [False, True])
def test_plans_are_as_fast_as_those_of_highs(number: int, copies: bool, seed: int) -> None:
    rng = random.Random(f"{seed} {number}")
    blocks = drawn_chain(rng, copies)
    link: dict[str, Any] = {}
    if copies:
        link = {name: rng.choice([2, 8, 32]) for name in ("out_bytes_per_second", "in_bytes_per_second")}
        link |= {"copy_share": rng.choice([0.0, 0.25, 0.5, 1.0]), "prefetch": rng.randint(1, 4)}
    frontier = checkpoint_frontier(blocks, **link)
    low, high = smallest_budget(blocks, link), frontier[-1].peak_bytes
    assert least_seconds(blocks, low - 1, link) is None
    assert frontier[0].peak_bytes == low
    for i in range(BUDGETS):
        budget = low + (high - low) * i // (BUDGETS - 1)
        least = least_seconds(blocks, budget, link)
        plan = checkpoint_plan(blocks, budget, **link)
        assert plan.peak_bytes <= budget
        assert plan.seconds == pytest.approx(least, abs=TOLERANCE) and plan.least_seconds == plan.seconds
        within = [point.seconds for point in frontier if point.peak_bytes <= budget]
        if copies:  # the frontier is a selection
            assert all(seconds >= plan.seconds for seconds in within)
        else:
            assert within[-1] == plan.seconds

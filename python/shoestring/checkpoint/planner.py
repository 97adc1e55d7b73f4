"""Plans that keep, recompute or offload activations so that training fits a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "CheckpointPlan",
    "PlanBlock",
    "PlanChoice",
    "checkpoint_frontier",
    "checkpoint_plan",
    "simulate_checkpoint_plan",
]


@dataclass(frozen=True)
class PlanChoice:
    """One possible treatment of a block's activations, such as to keep or to recompute them.

    Attributes:
        name: a label for reports, such as "keep" or "recompute".
        bytes: bytes held on the device from the end of the block's forward to the end of its backward.
        extra_seconds: seconds of recomputation, which are added to the block's backward time.
        link_bytes: bytes copied to the host after the block's forward, and copied back before its backward.
        forward_bytes: peak bytes of the block's forward, without the bytes that earlier blocks hold. The peak
            includes the bytes that the block itself holds, so the planner uses at least ``bytes +
            link_bytes``.
        backward_bytes: peak bytes of the block's backward, counted like ``forward_bytes``.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, simulate_checkpoint_plan
        >>> recompute = PlanChoice("recompute", bytes=10, extra_seconds=1.0, backward_bytes=100)
        >>> plan = simulate_checkpoint_plan([PlanBlock(1.0, 2.0, [recompute])] * 3, [0, 0, 0], budget=1000)
        >>> plan.peak_bytes, plan.seconds
        (120, 12.0)
    """

    name: str
    bytes: int = 0
    extra_seconds: float = 0.0
    link_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class PlanBlock:
    """A block's forward and backward time in seconds, and the possible treatments of its activations.

    ``gradient_bytes`` are bytes that the block's backward leaves on the device until the end of backward, such as
    gradients of its weights. The backward of all earlier blocks has them beside it. The ``backward_bytes`` of the
    block's own choices include them already.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, checkpoint_plan
        >>> choices = [PlanChoice("keep", bytes=100), PlanChoice("recompute", bytes=10, extra_seconds=1.0)]
        >>> block = PlanBlock(forward_seconds=1.0, backward_seconds=2.0, choices=choices)
        >>> checkpoint_plan([block], budget=50).names
        ('recompute',)
    """

    forward_seconds: float
    backward_seconds: float
    choices: Sequence[PlanChoice]
    gradient_bytes: int = 0


@dataclass(frozen=True)
class CheckpointPlan:
    """The chosen treatment of each block, with the predicted memory and time.

    Attributes:
        choices: for each block, the index of its treatment in ``PlanBlock.choices``.
        names: for each block, the name of its treatment.
        pending_bytes: for each block, the maximum bytes of earlier blocks that may still be in flight to the
            host when the block begins. With this limit the peak stays within the budget, and at most 5 %
            above ``peak_bytes``, however slow the copies are.
        peak_bytes: the predicted peak of the bytes of activations on the device.
        seconds: predicted time of forward and backward.
        least_seconds: a lower bound of the time of any plan; equal to ``seconds`` if the plan is proven
            optimal.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, checkpoint_plan
        >>> choices = [PlanChoice("keep", bytes=100), PlanChoice("recompute", bytes=10, extra_seconds=1.0)]
        >>> plan = checkpoint_plan([PlanBlock(1.0, 2.0, choices)] * 3, budget=1000)
        >>> plan.names, plan.seconds
        (('keep', 'keep', 'keep'), 9.0)
    """

    choices: tuple[int, ...]
    names: tuple[str, ...]
    pending_bytes: tuple[int, ...]
    peak_bytes: int
    seconds: float
    least_seconds: float


def checkpoint_plan(
    blocks: Sequence[PlanBlock],
    budget: int,
    *,
    out_bytes_per_second: float = 0.0,
    in_bytes_per_second: float = 0.0,
    copy_share: float = 0.0,
    prefetch: int = 1,
) -> CheckpointPlan:
    """Return the fastest treatments of blocks whose peak memory is within ``budget`` bytes.

    The planner predicts time and memory by this model of the device:

    - Forward runs the blocks in order. After each block, its ``link_bytes`` join the queue of copies to the
      host. Copies free their bytes as they progress.
    - During forward the device holds the bytes of earlier blocks, the bytes not yet copied to the host, and
      the running block's ``forward_bytes``. A block waits for copies until the sum of these is within the
      budget.
    - Backward starts after the last copy to the host and runs the blocks in reverse. A block waits until its
      ``link_bytes`` have been copied back.
    - During backward the device holds the bytes of earlier blocks and the running block's
      ``backward_bytes``. It also holds the ``gradient_bytes`` of the later blocks, and the ``link_bytes`` of
      the ``prefetch`` blocks before the running block in forward order.
    - Copies slow down the computation that runs beside them, by ``copy_share`` of the time of the copies.

    The solver is a dynamic program over Pareto-optimal states, without states that a Lagrangian lower bound
    rules out. The solver is exact up to 100000 states; with more, ``least_seconds`` bounds how far the plan
    is from the optimum. If the solver has dropped all states that fit into the budget, it returns the last plan
    of :func:`checkpoint_frontier` that does. Equal blocks make few states, so round the measured numbers, or give equal blocks the
    same numbers. Two hundred equal blocks take about half a second.

    Args:
        blocks: the blocks in the order of forward, at most 1000.
        budget: maximum bytes of activations on the device.
        out_bytes_per_second: bandwidth of copies to the host; required if a treatment has ``link_bytes``.
        in_bytes_per_second: bandwidth of copies from the host to the device.
        copy_share: the share of compute speed that a running copy takes, 0 to 1. On a CPU a copy occupies a
            core.
        prefetch: how many blocks ahead of backward the copy back of a block may start, 1 to 4.

    Returns:
        The plan.

    Raises:
        RuntimeError: a number is out of range, or no plan fits the budget; the message gives the smallest
            sufficient budget.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, checkpoint_plan
        >>> choices = [PlanChoice("keep", bytes=100), PlanChoice("recompute", bytes=10, extra_seconds=1.0)]
        >>> plan = checkpoint_plan([PlanBlock(1.0, 2.0, choices)] * 3, budget=250)
        >>> plan.names.count("recompute"), plan.peak_bytes <= 250
        (1, True)
    """
    plan, pending, peak, seconds, least = torch.ops.shoestring.checkpoint_plan(
        *_flat(blocks),
        budget=budget,
        out_bytes_per_second=out_bytes_per_second,
        in_bytes_per_second=in_bytes_per_second,
        copy_share=copy_share,
        prefetch=prefetch,
    )
    return CheckpointPlan(tuple(plan), _names(blocks, plan), tuple(pending), peak, seconds, least)


def checkpoint_frontier(
    blocks: Sequence[PlanBlock],
    *,
    out_bytes_per_second: float = 0.0,
    in_bytes_per_second: float = 0.0,
    copy_share: float = 0.0,
    prefetch: int = 1,
) -> list[CheckpointPlan]:
    """Return the plans that are the fastest for some budget, from the smallest peak memory to the least time.

    Each plan has a higher peak and takes less time than the one before it. The fastest plan within a budget is
    therefore the last one whose peak is within it. Peak and time are those that :func:`checkpoint_plan`
    predicts.

    Without copies to the host, the result is exact while at most 1024 partial plans remain after each block;
    with more, the plans are a selection along the whole range of budgets. If some treatments have
    ``link_bytes``, forward waits as it would for one of 9 budgets, and the result is a selection.

    Args:
        blocks: the blocks in the order of forward, at most 1000.
        out_bytes_per_second: as for :func:`checkpoint_plan`, like the other arguments.

    Returns:
        The plans.

    Raises:
        RuntimeError: a number is out of range.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, checkpoint_frontier
        >>> choices = [PlanChoice("keep", bytes=100), PlanChoice("recompute", bytes=10, extra_seconds=1.0)]
        >>> plans = checkpoint_frontier([PlanBlock(1.0, 2.0, choices)] * 3)
        >>> [(plan.peak_bytes, plan.seconds) for plan in plans]
        [(30, 12.0), (120, 11.0), (210, 10.0), (300, 9.0)]
    """
    found = torch.ops.shoestring.checkpoint_frontier(
        *_flat(blocks),
        out_bytes_per_second=out_bytes_per_second,
        in_bytes_per_second=in_bytes_per_second,
        copy_share=copy_share,
        prefetch=prefetch,
    )
    return [
        CheckpointPlan(tuple(plan), _names(blocks, plan), tuple(pending), peak, seconds, seconds)
        for plan, pending, peak, seconds in zip(*found, strict=True)
    ]


def simulate_checkpoint_plan(
    blocks: Sequence[PlanBlock],
    choices: Sequence[int],
    budget: int,
    *,
    out_bytes_per_second: float = 0.0,
    in_bytes_per_second: float = 0.0,
    copy_share: float = 0.0,
    prefetch: int = 1,
) -> CheckpointPlan:
    """Return the memory and time that the planner's model predicts for given treatments of the blocks.

    If the treatments do not fit, the predicted peak is above ``budget``.

    Example:
        >>> from shoestring.checkpoint.planner import PlanBlock, PlanChoice, simulate_checkpoint_plan
        >>> choices = [PlanChoice("keep", bytes=100), PlanChoice("recompute", bytes=10, extra_seconds=1.0)]
        >>> block = PlanBlock(1.0, 2.0, choices)
        >>> simulate_checkpoint_plan([block, block], [0, 1], budget=1000).seconds
        7.0
    """
    pending, peak, seconds = torch.ops.shoestring.simulate_checkpoint_plan(
        *_flat(blocks),
        list(choices),
        budget=budget,
        out_bytes_per_second=out_bytes_per_second,
        in_bytes_per_second=in_bytes_per_second,
        copy_share=copy_share,
        prefetch=prefetch,
    )
    return CheckpointPlan(tuple(choices), _names(blocks, choices), tuple(pending), peak, seconds, seconds)


def _names(blocks: Sequence[PlanBlock], choices: Sequence[int]) -> tuple[str, ...]:
    return tuple(block.choices[choice].name for block, choice in zip(blocks, choices, strict=True))


def _flat(blocks: Sequence[PlanBlock]) -> tuple[list[float] | list[int], ...]:
    """Return the fields of blocks and of their choices as the lists that the C++ planner takes."""
    choices = [choice for block in blocks for choice in block.choices]
    return (
        [block.forward_seconds for block in blocks],
        [block.backward_seconds for block in blocks],
        [len(block.choices) for block in blocks],
        [choice.bytes for choice in choices],
        [choice.extra_seconds for choice in choices],
        [choice.link_bytes for choice in choices],
        [choice.forward_bytes for choice in choices],
        [choice.backward_bytes for choice in choices],
        [block.gradient_bytes for block in blocks],
    )

"""Which activations are kept, recomputed or moved to the host, so that training fits a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlanChoice:
    """One way to treat a block's activations.

    Attributes:
        name: for the reader, such as "keep" or "recompute".
        bytes: held on the device from the end of the block's forward to the end of its backward.
        extra_seconds: spent in backward besides the block's own backward: its recomputation.
        link_bytes: copied to the host behind the block's forward, and back before its backward.
        forward_bytes: the peak of the block's own forward besides what the blocks before it hold. What the block itself holds
            by then counts, so ``bytes + link_bytes`` is the least that is reckoned with.
        backward_bytes: the same of its backward.
    """

    name: str
    bytes: int = 0
    extra_seconds: float = 0.0
    link_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class PlanBlock:
    """A block's time in forward and backward, in seconds, and the ways to treat its activations."""

    forward_seconds: float
    backward_seconds: float
    choices: Sequence[PlanChoice]


@dataclass(frozen=True)
class CheckpointPlan:
    """What was chosen, and what that is predicted to cost.

    Attributes:
        choices: of each block, an index into its choices.
        names: their names.
        pending_bytes: of each block, how many bytes of those before it may still be on their way to the host when it
            begins, so that the peak is within the budget, and at most 5 % above ``peak_bytes``, however slow copies are.
        peak_bytes: the most that is on the device at any moment.
        seconds: of forward and backward.
        least_seconds: no plan takes less; equal to ``seconds`` where the plan is proven to be the best.
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
    """The choices with the least time of forward and backward whose peak is within ``budget`` bytes.

    The model. Forward runs the blocks in order; behind each, its ``link_bytes`` join the copies to the host, which free their
    bytes as they go. At every moment of forward the device has: what the blocks before hold, what is still to be copied, and
    the running block's ``forward_bytes``; a block waits for copies until that fits. Backward starts when the last copy is out,
    and runs the blocks in reverse; a block waits until its ``link_bytes`` have arrived. The device then has: what the blocks
    before hold, the block's ``backward_bytes``, and the ``link_bytes`` of the ``prefetch`` blocks before it. A block that copies
    computes longer, by ``copy_share`` of its copies' time.

    A dynamic program over the states that no other is at least as good as in every respect, without those that a Lagrangian
    lower bound rules out: exact up to 100000 states, and beyond that ``least_seconds`` tells how far off the plan can be.
    Blocks that are alike make few states: round what was measured, or give alike blocks the same numbers. Two hundred such
    blocks take about half a second.

    Args:
        blocks: in the order of forward, at most 1000.
        budget: bytes of the device for activations.
        out_bytes_per_second: bandwidth of the link to the host; needed where a choice has ``link_bytes``.
        in_bytes_per_second: of the other direction.
        copy_share: of the computation's speed that a copy takes while it runs, 0 to 1: on a CPU it wants a core.
        prefetch: a block's copy back may start when the backward of the block so many places behind it starts: 1 to 4.

    Raises:
        RuntimeError: a number out of range, or a budget that no plan fits, with the least that one does.
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
    """What ``checkpoint_plan``'s model predicts for given choices; where they do not fit, the peak is above ``budget``."""
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
    )

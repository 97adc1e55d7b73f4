"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

DECAY_SHARE = 0.2  # of all steps, at the end of warmup-stable-decay (Hu et al. 2024 use 10 to 20 %)


def learning_rate(step: int, *, lr: float, steps: int, warmup: int, schedule: str) -> float:
    """Learning rate of ``step`` (from 0): a linear warm-up over ``warmup`` steps, then the schedule, down to 0.

    ``schedule``: constant, linear, cosine (Loshchilov & Hutter 2017), or wsd (constant, then linear in the
    last fifth).
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return lr
    if schedule == "linear":
        return lr * (1 - progress)
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "wsd":
        return lr * min(1.0, (1 - progress) / DECAY_SHARE)
    raise ValueError(f"schedule: expected constant, linear, cosine or wsd, got {schedule!r}")

"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

# Fraction of the steps after warm-up, at the end of training, in which the schedule wsd decays. Hu et al.,
# 2024, use 10 to 20 %.
DECAY_SHARE = 0.2


def learning_rate(step: int, *, lr: float, steps: int, warmup: int, schedule: str) -> float:
    """Return the learning rate of step ``step``: linear warm-up over ``warmup`` steps, then the schedule.

    ``step`` counts from 0. ``schedule`` is constant, linear (down to 0), cosine (Loshchilov & Hutter 2017,
    down to 0), or wsd. wsd stands for warmup-stable-decay: constant, then linear down to 0 in the last fifth
    of the steps after warm-up.
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

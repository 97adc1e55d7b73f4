"""Train some batches of a plan with a learning rate of 0, and measure their time and memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.measure import gradients_aside, metered, no_collection
from shoestring.checkpoint.weights import bytes_here
from shoestring.core.device import is_asynchronous, synchronize
from shoestring.core.errors import InputError
from shoestring.core.process_memory import peak_bytes, reset_peak, return_freed

if TYPE_CHECKING:
    from shoestring.planning.training_plan import TrainingPlan

Example = Callable[[int], Tensor]
LONGEST = 5.0  # seconds of all trials together, except that each plan has one
TOO_LONG = 15.0  # limit of the predicted seconds of one trial of each plan
TURNS = 5  # trials of each plan, of two batches each
# Micro-batches of a batch of a trial. The first one makes gradients, those in the middle add to them, and the last one
# may have steps within backward.
PASSES = 3


class NotFiniteError(InputError):
    """The loss or a gradient of a trial is not finite."""


@dataclass
class Trial:
    """Two batches of a plan: the time of the second one, and the memory of both.

    ``device_bytes``: weights, and all that was allocated. ``process_bytes``: the high-water mark of the resident memory
    of the process on a CPU, else of what the allocator has reserved; 0 if the system does not tell it.
    """

    seconds: float
    device_bytes: int
    process_bytes: int


def run_trial(
    plan: TrainingPlan,
    model: nn.Module,
    example: Example,
    kind: Callable[..., torch.optim.Optimizer],
    passes: int | None = None,
) -> Trial:
    """Train two batches of a model to which a plan was applied, and measure them.

    Weights, gradients, buffers and random state are as before.

    Args:
        plan: the plan.
        model: the model.
        example: returns the loss of so many rows.
        kind: makes the optimizer of parameters and options.
        passes: the most micro-batches that run of each batch, at least PASSES. The time of the others is computed.

    Raises:
        NotFiniteError: the loss or a gradient is not finite, with which a step would change the weights.
    """
    device = next(p.device for p in model.parameters())
    weights = bytes_here(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return_freed()
    peak = _process_peak(device)
    with (
        no_collection(),
        gradients_aside(model) as aside,
        metered(device) as meter,
        aside.kept(),
        _checked(trained if plan.step_in_backward else []),
    ):
        optimizer: Any = kind(trained, lr=0.0, weight_decay=0.0, **plan.optimizer)
        try:
            for _ in range(2):
                meter.reset_peak()
                seconds = _batch(plan, example, optimizer, trained, device, passes)
            used = weights + meter.peak()
        finally:
            del optimizer
    return Trial(seconds, used, peak())


def _process_peak(device: torch.device) -> Callable[[], int]:
    """Begin to follow the memory of the process; return a function that returns its peak, or 0 if it is not known."""
    if is_asynchronous(device):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return lambda: torch.accelerator.max_memory_reserved(device)
    return peak_bytes if reset_peak() else lambda: 0


@contextmanager
def _checked(trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Refuse gradients that are not finite before an optimizer steps within backward."""
    hooks = [p.register_post_accumulate_grad_hook(_check_gradient) for p in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_gradient(p: Tensor) -> None:
    # A step with a learning rate of 0 would turn the weights into NaN. A sum needs no memory.
    if p.grad is not None and not math.isfinite(p.grad.sum().item()):
        raise NotFiniteError(
            "TrainingPlan: check: example: expected finite gradients, received one that is not"
        )


def _batch(
    plan: TrainingPlan,
    example: Example,
    optimizer: Any,
    trained: Sequence[nn.Parameter],
    device: torch.device,
    passes: int | None,
) -> float:
    """Take one step of a whole batch, or of some micro-batches of it; return the seconds of a whole batch."""
    count = min(plan.accumulate, passes or plan.accumulate)
    seconds = []
    for number in range(count):
        adds = plan.step_in_backward and number + 1 < count
        began = time.perf_counter()
        with optimizer.accumulate() if adds else nullcontext():
            with plan.autocast(device.type):
                loss = example(plan.micro_batch) / plan.accumulate
            value = loss.item()
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"TrainingPlan: check: example: expected a finite loss, received {value}"
                )
            loss.backward()
        del loss
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    if not plan.step_in_backward:
        for p in trained:
            _check_gradient(p)
    began = time.perf_counter()
    optimizer.step()
    synchronize(device)
    step = time.perf_counter() - began
    optimizer.zero_grad(set_to_none=True)
    others = statistics.mean(seconds[1:-1]) * (plan.accumulate - count) if count < plan.accumulate else 0.0
    return sum(seconds) + others + step


@dataclass
class Measured:
    """A plan with the results of its trials; without one, its time is the predicted one."""

    plan: TrainingPlan
    trials: list[Trial] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of the fastest batch, since other programs only add to a time."""
        predicted: float = self.plan.seconds
        return min((trial.seconds for trial in self.trials), default=predicted)

    @property
    def process_bytes(self) -> int:
        """The largest peak of the process."""
        return max(trial.process_bytes for trial in self.trials)


def run_trials(
    plans: Sequence[TrainingPlan],
    model: nn.Module,
    example: Example,
    kind: Callable[..., torch.optim.Optimizer],
) -> list[Measured]:
    """Run trials of plans in turn for about LONGEST seconds, and return their results in the order of the plans.

    The last plans are left out if they would take too long. The result is empty if fewer than two remain.

    Raises:
        NotFiniteError: the loss or a gradient is not finite.
    """
    expected, count = 0.0, 0
    for plan in plans:
        expected += 2 * plan.seconds * min(plan.accumulate, PASSES) / plan.accumulate
        count += expected <= TOO_LONG
    if count < min(2, len(plans)):
        return []
    plans = plans[:count]
    measured = [Measured(plan) for plan in plans]
    began = time.perf_counter()
    for turn in range(1, TURNS + 1):
        for one in measured if turn % 2 else reversed(measured):
            applied = one.plan.apply(model)
            try:
                one.trials.append(run_trial(one.plan, model, example, kind, passes=PASSES))
            finally:
                applied.undo()
        taken = time.perf_counter() - began
        if taken + taken / turn > LONGEST:
            break
    return measured

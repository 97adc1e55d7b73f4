"""Choose the precision of a run whose ``--precision`` is "auto": the fastest that agrees with fp32.

Each candidate runs forward and backward of the same rows of the training data, in turns. The choice changes no weight,
gradient, buffer or random state, so the run has the bits of one with the option ``--precision`` of its choice.

**Memory.** A trial takes at most half of the rows of a micro-batch. Their activations in fp32 have the bytes of all rows
in 16 bits. Each gradient is freed as soon as its norm is known. With an option that leaves fewer activations on the
device, all blocks are recomputed in the trial, and there is no trial if weights leave the device later.

**Time.** All trials take at most a tenth of the estimated time of the run and 20 s, or 3 % of a long run.

On a CPU, a large model runs few of its blocks that are alike.

**Agreement.** A product rounds to a relative error of up to epsilon / 2 of the format. The errors of n products in a row
are independent, so they add up to sqrt(n) times as much. With a margin of 2, losses may differ by sqrt(n) epsilon, where
n is the number of weight matrices. A gradient depends on three times as many products.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.checkpoint.measure import no_collection
from shoestring.checkpoint.model import checkpoint_model
from shoestring.checkpoint.weights import OWNER
from shoestring.core.device import is_asynchronous, is_cuda
from shoestring.core.errors import InputError
from shoestring.planning.candidates import NoPlanError
from shoestring.planning.shortened import OtherResultError, shortened
from shoestring.training.config import LoopConfig
from shoestring.training.conflicts import run_conflicts
from shoestring.training.run.device import PRECISIONS, check_precision
from shoestring.training.run.folder import with_choices
from shoestring.training.run.loop import Trainer
from shoestring.training.run.probe import (
    LEAST_MICRO_BATCHES,
    Trial,
    micro_batches,
    run_pass,
    some_batch,
    takes_seconds,
)

ROUNDS = 3  # micro-batches that each candidate runs
WARM_UP = 0.1  # seconds that the first pass in a precision may take longer, for code that is generated then
SHARE, SECONDS, SHARE_OF_LONG_RUN = 0.1, 20.0, 0.03
EPSILON = {"tf32": 2.0**-10, "bf16": 2.0**-7, "fp16": 2.0**-10}
# A later precision of PRECISIONS is chosen only if it is faster than the best before it by this factor. That of fp16
# is larger, since its loss is scaled, and steps whose gradients overflow are skipped.
FASTER = {"tf32": 1.05, "bf16": 1.05, "fp16": 1.1}
Plan = TypeVar("Plan")


class Choice(NamedTuple):
    """The precision that was chosen, the reason as text, and all that agree with fp32."""

    precision: str
    reason: str
    agreeing: Collection[str] = ()


def planned_in_precision(
    trainer: Trainer, rebuild: Callable[[LoopConfig], None] | None, plan: Callable[[Trainer], Plan]
) -> Plan:
    """Choose the precision of a run with ``--precision auto``, and return its plan.

    If no plan in fp32 fits, a run of one process takes bf16, if its losses agree: weights below an adapter and activations
    are smaller.

    Args:
        trainer: the training loop, without optimizers.
        rebuild: builds the model anew for these options, if the dtype of its weights depends on the precision.
        plan: plans the run, or raises NoPlanError.
    """
    agreeing = choose_precision(trainer, rebuild)
    try:
        return plan(trainer)
    except NoPlanError:
        run = trainer.run
        if run.config.precision != "fp32" or "bf16" not in agreeing or run.processes.count > 1:
            raise
    trainer.progress.note("--precision auto: bf16, since no plan in fp32 fits")
    _take(trainer, "bf16", rebuild)
    return plan(trainer)


def choose_precision(
    trainer: Trainer, rebuild: Callable[[LoopConfig], None] | None = None
) -> Collection[str]:
    """Choose the precision of a run with ``--precision auto``, say which it is, and record it in run.json.

    Args:
        trainer: the training loop, without optimizers.
        rebuild: builds the model anew for these options, if the dtype of its weights depends on the precision.

    Returns:
        The precisions that were measured and agree with fp32.
    """
    if trainer.run.config.precision != "auto":
        return ()
    hindrance = _hindrance(trainer)
    agreeing: Collection[str] = ()
    if hindrance is None:
        began = time.perf_counter()
        with no_collection():
            try:
                chosen, reason, agreeing = _fastest(trainer, takes_seconds(trainer))
            except OtherResultError:
                chosen, reason, agreeing = _fastest(trainer, is_long=False)
        reason += f", measured in {time.perf_counter() - began:.1f} s"
        if is_asynchronous(trainer.run.device):
            torch.accelerator.empty_cache()
    else:
        chosen, reason = "fp32", hindrance
    other = "bf16" if chosen == "fp32" else "fp32"
    trainer.progress.note(f"--precision auto: {chosen} ({reason}); --precision {other} takes another")
    _take(trainer, chosen, rebuild)
    return agreeing


def _take(trainer: Trainer, precision: str, rebuild: Callable[[LoopConfig], None] | None) -> None:
    trainer.follow(with_choices(trainer.run, {"precision": precision}))
    if rebuild is not None and trainer.run.config.autocast is not None:
        rebuild(trainer.run.config)


def candidates(config: LoopConfig, device: torch.device) -> list[str]:
    """Return the precisions that the device computes with units of its own and the options allow, fp32 first."""
    names = ["fp32"]
    for name in PRECISIONS[1:]:
        try:
            check_precision(name, config.weights, device)
        except InputError:
            continue
        if _has_units(name, device) and not any(run_conflicts(replace(config, precision=name))):
            names.append(name)
    return names


def _has_units(precision: str, device: torch.device) -> bool:
    """Return whether products in this precision may be faster than in fp32 on the device.

    A CPU without units for bf16 may still gain by smaller activations. One without units for fp16 converts numbers, as
    for bf16, but more slowly.
    """
    if precision == "fp16" and device.type == "cpu":
        return torch.cpu._is_amx_fp16_supported()
    if precision == "tf32" and is_cuda(device):
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return (
        precision != "bf16" or not is_cuda(device) or torch.cuda.is_bf16_supported(including_emulation=False)
    )


def _hindrance(trainer: Trainer) -> str | None:
    """Return why there is no trial, or None."""
    config, count = trainer.run.config, trainer.run.processes.count
    number = micro_batches(config, count)
    if number < LEAST_MICRO_BATCHES:
        return f"not measured in a run of {number} micro-batches, fewer than {LEAST_MICRO_BATCHES}"
    if count > 1 and config.parallel in ("zero3", "hsdp"):
        return f"not measured, since --parallel {config.parallel} splits the weights later"
    if config.weights_place is not None and not hasattr(trainer.model, OWNER):
        return f"not measured, since the weights leave for --offload-weights {config.weights_place} later"
    return None


def _fastest(trainer: Trainer, is_long: bool) -> Choice:
    """Run the trials, with few blocks if a pass is long; return the chosen precision."""
    config, device = trainer.run.config, trainer.run.device
    names = candidates(config, device)
    if len(names) == 1:
        return Choice("fp32", f"the only one for {device} and these options")
    trainer.model.train()
    # As few activations as the run may have, whatever its plan for them will be.
    is_small = config.activations != "keep" or bool(config.memory_budget or config.asks_plan)
    blocks = listed_blocks(trainer.model)  # none of a model with one block
    with ExitStack() as stack:
        if is_small and blocks:
            stack.callback(checkpoint_model(trainer.model).undo)
        share = 1.0
        if is_long and blocks:
            run = stack.enter_context(shortened(trainer.model, blocks))
            share = len(run) / len(blocks)
        rows = _rows(trainer, len(names), share)
        if rows is None:
            return Choice("fp32", "since trials of others would take too long for this run")
        return _compare(trainer, names, rows)


def _rows(trainer: Trainer, precisions: int, share: float) -> list[list[int]] | None:
    """Return the rows of each round, the longest of the data first, or None if the trials would take too long.

    ``share`` is that of the model's blocks that trials run.
    """
    config, processes, count = trainer.run.config, trainer.run.processes, trainer.train.count
    longest = trainer.longest_rows()
    order = trainer.order()
    drawn = [rows for step in range(ROUNDS - 1) for rows in order.step(step)][: ROUNDS - 1]
    run_pass(trainer, "fp32", some_batch(trainer, longest[:1]))  # the first pass of a process takes longer
    seconds = run_pass(trainer, "fp32", some_batch(trainer, longest[:1])).seconds
    per_token = float(processes.largest(torch.tensor(seconds))) / max(1, count(longest[:1]))
    whole = per_token / share * statistics.fmean(map(count, drawn)) * micro_batches(config, processes.count)
    most = 1 if config.asks_plan else max(1, len(longest) // 2)
    for number in range(most, 0, -1):
        rounds = [longest[:number], *(rows[:number] for rows in drawn)]
        trials = per_token * precisions * sum(map(count, rounds))
        if trials <= min(SHARE * whole, SECONDS) or (number == 1 and trials <= SHARE_OF_LONG_RUN * whole):
            return rounds
    return None


def _compare(trainer: Trainer, names: list[str], rows: list[list[int]]) -> Choice:
    """Run the rounds of all candidates in turns; return the chosen precision."""
    times: dict[str, list[float]] = {name: [] for name in names}
    refused: dict[str, str] = {}
    for some_rows in rows:
        batch = some_batch(trainer, some_rows)
        exact = run_pass(trainer, "fp32", batch)
        times["fp32"].append(exact.seconds)
        for name in names[1:]:
            if name in refused:
                continue
            try:
                trial = run_pass(trainer, name, batch)
            except RuntimeError as error:  # an operator that the device lacks in this precision, or no memory
                refused[name] = str(error).partition("\n")[0]
                continue
            times[name].append(trial.seconds)
            reason = _disagreement(trainer, name, trial, exact)
            if reason is None and trial.seconds > 2 * exact.seconds + WARM_UP:
                reason = f"{trial.seconds / exact.seconds:.1f} times as slow"
            if reason is not None:
                refused[name] = reason
    medians = [math.inf if name in refused else statistics.median_low(times[name]) for name in names]
    # All processes take the same decision, by the slowest of them.
    seconds = dict(zip(names, trainer.run.processes.largest(torch.tensor(medians)).tolist()))
    best = "fp32"
    for name in names[1:]:
        if seconds[name] * FASTER[name] < seconds[best]:
            best = name
    speeds = [
        f"{name} refused: {refused.get(name, 'by another process')}"
        if math.isinf(seconds[name])
        else f"{name} {seconds['fp32'] / seconds[name]:.2f}"
        for name in names[1:]
    ]
    agreeing = [name for name in names if not math.isinf(seconds[name])]
    return Choice(best, f"speed of forward and backward over fp32: {', '.join(speeds)}", agreeing)


def _disagreement(trainer: Trainer, precision: str, trial: Trial, exact: Trial) -> str | None:
    """Say how a trial differs from that in fp32 by more than the rounding of products; None if it agrees."""
    products = sum(parameter.ndim >= 2 for parameter in trainer.model.parameters())
    for name, value, expected, number in (
        ("loss", trial.loss, exact.loss, products),
        ("gradient norm", trial.norm, exact.norm, 3 * products),
    ):
        # A value that is not finite fails the comparison.
        if not abs(value - expected) <= EPSILON[precision] * math.sqrt(number) * abs(expected):
            return f"its {name} is {value:.4g}, that of fp32 is {expected:.4g}"
    return None

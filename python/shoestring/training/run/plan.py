"""Plan a run: what a step does so that it is the fastest within the budgets, by default within what is free.

With ``--device-memory auto``, a run is planned if planning takes at most a tenth of its estimated time, or if its
micro-batches may need more than the free memory. Options for which nothing is planned, and models without a list of
blocks, then train as the options say.

Of several processes, the first one plans for all of them, and the others wait.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shoestring.checkpoint.measure import metered, no_collection
from shoestring.checkpoint.weights import OWNER
from shoestring.core.device import is_asynchronous
from shoestring.core.errors import InputError
from shoestring.core.process_memory import resident_bytes, spare_bytes
from shoestring.data.batches import labelled
from shoestring.distributed.links import Link, measure_link
from shoestring.planning.candidates import NoPlanError
from shoestring.planning.situation import BESIDE_STEPS
from shoestring.planning.training_plan import AppliedPlan, TrainingPlan, disk_budget, plan_training
from shoestring.training.config import ROUNDING, FinetuneConfig, LoopConfig
from shoestring.training.conflicts import unplanned
from shoestring.training.memory import parse_budget
from shoestring.training.optimizers import trained
from shoestring.training.options import environment_number
from shoestring.training.run.checkpoint import checkpoints
from shoestring.training.run.folder import (
    SPLITS_WEIGHTS,
    next_budget,
    planned_options,
    planned_processes,
    recorded_plan,
    with_choices,
)
from shoestring.training.run.loop import Trainer
from shoestring.training.run.probe import (
    LEAST_MICRO_BATCHES,
    micro_batches,
    run_pass,
    some_batch,
    takes_seconds,
)

SHARE = 0.9  # of the free memory; the rest is left to other programs
SECONDS = 10.0  # about the time that planning takes
SHARE_OF_RUN = 0.1  # most of a run's estimated time that planning may take unasked
STATE_BYTES = 8  # most bytes of AdamW's state of a trained weight
# The option that decides a lever of a plan.
OPTION_OF = {
    "micro_batch": "--accumulate",
    "activations": "--activations",
    "optimizer_state": "--optimizer-state",
    "step_in_backward": "--step-in-backward",
    "offload": "--offload",
    "precision": "--precision",
    "parallel": "--parallel",
}
# The levers whose values are those of the option.
SAME = OPTION_OF.keys() - {"micro_batch", "precision", "parallel"}
Json = dict[str, Any]


def choose_plan(trainer: Trainer) -> TrainingPlan | None:
    """Plan a run, say what was chosen, and record it in run.json; return None for a run without a plan.

    A resumed run follows the plan that it has.
    """
    run = trainer.run
    config, processes = run.config, run.processes
    former = None
    if config.resume:
        former = _plan_of(processes.from_first(lambda: _content(recorded_plan(run))))
    if former is not None and not config.replan:
        first = str(former).partition("\n")[0]
        trainer.progress.note(f"--resume: the run keeps its plan, also with other budgets: {first}")
        trainer.follow(replace(run, plan=former))
        return former
    hindrance = None if config.asks_plan else processes.from_first(lambda: _hindrance(trainer))
    if hindrance is not None:
        if hindrance:
            trainer.progress.note(f"plan: none, since {hindrance}")
        return None
    link = None if processes.count == 1 else measure_link(run.device)
    found = processes.from_first(lambda: _found(trainer, former, link))
    plan = _plan_of(found["plan"])
    if plan is None:
        trainer.progress.note(f"plan: none, since {found['hindrance']}")
        return None
    _say(trainer, plan)
    trainer.follow(with_choices(run, planned_options(plan, processes.count), plan))
    return plan


def _found(trainer: Trainer, former: TrainingPlan | None, link: Link | None) -> Json:
    """Return the content of a run's plan; without one, why there is none if the run may do without it.

    Args:
        former: the plan that the run had, which the new one replaces.
        link: what connects several processes.
    """
    run = trainer.run
    most = None
    if former is not None and planned_processes(run) == run.processes.count:
        most = next_budget(former, None if is_asynchronous(run.device) else resident_bytes() + BESIDE_STEPS)
    try:
        plan = plan_run(trainer, most, run.processes.count, link)
        if plan.parallel == SPLITS_WEIGHTS and _is_open(run.config) and checkpoints(run.folder):
            # A checkpoint of whole weights has their state in another form. This strategy needs the least memory.
            plan = plan_run(trainer, most, run.processes.count, link, "zero2")
    except InputError as error:
        if run.config.asks_plan:
            raise
        if isinstance(error, NoPlanError):
            raise InputError(f"{error}; --device-memory none trains without a plan") from None
        return {"plan": None, "hindrance": str(error)}
    return {"plan": plan.to_dict()}


def _content(plan: TrainingPlan | None) -> Json | None:
    return None if plan is None else plan.to_dict()


def _plan_of(content: Json | None) -> TrainingPlan | None:
    return None if content is None else TrainingPlan(content)


def _is_open(config: LoopConfig) -> bool:
    """Return whether the options leave the strategy of several processes open."""
    return config.parallel in ("none", "auto")


def _hindrance(trainer: Trainer) -> str | None:
    """Return why a run is not planned unasked, an empty text if that needs no word; None if it is planned."""
    run = trainer.run
    config, device = run.config, run.device
    if config.device_memory == "none" or config.baseline or (config.resume and checkpoints(run.folder)):
        return ""
    for option in unplanned(config):
        return f"nothing is planned with {option}"
    if config.weights_place is not None and not hasattr(trainer.model, OWNER):
        return f"the weights leave for --offload-weights {config.weights_place} later"
    number = micro_batches(config, run.processes.count)
    if number < LEAST_MICRO_BATCHES:
        return f"the run has {number} micro-batches, fewer than {LEAST_MICRO_BATCHES}"
    if takes_seconds(trainer):
        return None
    trainer.model.train()
    longest = trainer.longest_rows()
    batch = some_batch(trainer, longest[:1])
    run_pass(trainer, config.precision, batch)  # the first pass of a process takes longer
    with no_collection(), metered(device) as meter:
        seconds = run_pass(trainer, config.precision, batch).seconds
        row = meter.peak() * config.seq_len // max(1, batch[0].numel())
    whole = seconds * config.seq_len / max(1, batch[0].numel()) * config.batch_size * number
    params = trained(trainer.model)
    size = sum(p.nbytes + STATE_BYTES * p.numel() for p in params) + row * config.batch_size
    used = 0 if is_asynchronous(device) else resident_bytes()
    budget = budget_of(config, device)
    if whole * SHARE_OF_RUN < SECONDS and (budget is None or used + size <= budget):
        return f"planning takes about {SECONDS:.0f} s, more than a tenth of this run"
    return None


def plan_run(
    trainer: Trainer,
    most: int | None = None,
    processes: int = 1,
    link: Link | None = None,
    strategy: str | None = None,
) -> TrainingPlan:
    """Return the fastest plan within ``--device-memory``, ``--host-memory`` and ``--disk``, or without a limit.

    Args:
        trainer: the training loop, without optimizers.
        most: another limit of device memory, in bytes.
        processes: the number of processes that share the training.
        link: what connects several processes.
        strategy: their strategy; None for that of ``--parallel``.

    Raises:
        NoPlanError: no plan fits.
        InputError: a budget is no size.
    """
    config = trainer.run.config
    trainer.model.train()
    longest = trainer.longest_rows()
    budget = budget_of(config, trainer.run.device)
    if most is not None:
        budget = most if budget is None else min(most, budget)
    fixed = _given(config, trainer.pack)
    if processes > 1 and (strategy is not None or not _is_open(config)):
        fixed["parallel"] = strategy or config.parallel
    try:
        return plan_training(
            trainer.model,
            example=lambda number: _loss(trainer, longest, number),
            batch_size=config.batch_size * config.accumulate,
            device_memory=budget,
            host_memory=config.host_memory,
            disk=_disk(config),
            freedom=config.freedom,  # type: ignore[arg-type]  # the parser has checked it
            optimizer=config.optimizer,
            optimizer_options={"weight_rounding": ROUNDING[config.weights]},
            fixed=fixed,
            processes=processes,
            link=None if link is None else str(link),
        )
    except ValueError as error:
        reason = str(error).splitlines()[0].removeprefix("plan_training: ")
        lever, _, received = reason.removeprefix("fixed: ").partition(": ")
        if lever in OPTION_OF and reason.startswith("fixed: "):
            raise InputError(
                f"{OPTION_OF[lever]}: {received}; a plan has no other here, so leave the option out"
            ) from None
        if lever == "disk":
            raise InputError(f"--offload {config.offload}: {received}") from None
        reason = reason.replace('with freedom "method"', "without --full")
        kind = NoPlanError if isinstance(error, NoPlanError) else InputError
        raise kind(f"--device-memory {config.device_memory}: {reason}") from None


def apply_plan(trainer: Trainer, plan: TrainingPlan) -> AppliedPlan:
    """Give the blocks of the model their treatments; raise InputError if the plan in run.json is of another model."""
    try:
        return plan.apply(trainer.model)
    except InputError as error:
        reason = str(error).removeprefix("TrainingPlan: apply: ")
        raise InputError(f"{trainer.run.folder / 'run.json'}: plan: {reason}; give another --out") from None


def budget_of(config: LoopConfig, device: torch.device) -> int | None:
    """Return the value of ``--device-memory`` in bytes, or None for "none".

    "free" and "auto" are what is free now, or the part of it of each process of the machine, and what the run has.

    Raises:
        InputError: the value is no size.
    """
    if config.device_memory == "none":
        return None
    if config.device_memory not in ("free", "auto"):
        return parse_budget(config.device_memory, "device-memory")
    if is_asynchronous(device):
        free, _ = torch.accelerator.get_memory_info(device)
        return int(SHARE * free) + torch.accelerator.memory_reserved(device)
    return int(SHARE * spare_bytes()[1]) // processes_here(config) + resident_bytes()


def _disk(config: LoopConfig) -> str | None:
    """Return the folder for state, and its limit if there is one."""
    # State that a given --offload moves to a folder needs no --disk.
    moved = config.offload.removeprefix("nvme:") if config.offload.startswith("nvme:") else None
    disk, processes = config.disk or moved, processes_here(config)
    if disk is None or "=" in disk or processes == 1:
        return disk
    # The processes of a machine have equal parts of what is free.
    folder, free = disk_budget(disk, here=True)
    return disk if free is None else f"{folder}={free // processes}"


def processes_here(config: LoopConfig) -> int:
    """Return how many processes of the run share the memory of this machine."""
    return max(1, environment_number("LOCAL_WORLD_SIZE", 1)) if config.processes > 1 else 1


def _say(trainer: Trainer, plan: TrainingPlan) -> None:
    """Say in at most eight lines what was chosen, why, and how to choose otherwise."""
    first = str(plan).partition("\n")[0]
    reasons = [reason for reason in plan.reasons if not reason["text"].endswith(": as given")]
    trainer.progress.note(f"plan: {first}")
    for reason in reasons[:6]:
        trainer.progress.note(f"plan: {reason['text']}")
    options = [OPTION_OF.get(reason["lever"]) for reason in reasons if ": as given" not in reason["text"]]
    named = ", ".join(option for option in options if option is not None)
    if named:
        trainer.progress.note(f"plan: to choose otherwise, give {named}; the rest is then planned around it")


def _given(config: LoopConfig, pack: str) -> dict[str, Any]:
    """Return the choices that the user's options have made already."""
    fixed: dict[str, Any] = {"precision": config.precision}
    # Only a model that was trained before can do with adapters, which `finetune` has without --full.
    if not isinstance(config, FinetuneConfig):
        fixed["adapters"] = "none"
    # The state of a run that goes on has its format, and steps in backward if it has had them.
    given = config.given | {"optimizer_state", "step_in_backward"} if config.replan else config.given
    for name in sorted(SAME):
        value = getattr(config, name)
        if name in given or value != getattr(LoopConfig, name):
            fixed[name] = value
    # A row of --pack fill holds as many tokens as a micro-batch. A run that goes on may divide its batch anew.
    if pack == "fill" or ("accumulate" in given and not config.replan):
        fixed["micro_batch"] = config.batch_size
    return fixed


def _loss(trainer: Trainer, longest: list[int], number: int) -> Tensor:
    """Return the loss of a micro-batch of so many of the longest rows, which are repeated if the data has fewer."""
    rows = list(itertools.islice(itertools.cycle(longest), number))
    batch = trainer.batch(trainer.train, rows)
    inputs, labels, more = _pytree.tree_map_only(Tensor, lambda t: t.to(trainer.run.device), batch)
    return trainer.loss(inputs, labels, items=max(1, labelled(batch[1])), **more)

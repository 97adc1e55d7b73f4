"""``checkpoint_model``: which blocks of a model are checkpointed, by name or under a byte budget."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.blocks import Treatment, find_blocks, run_block, treat
from shoestring.checkpoint.function import Keep
from shoestring.checkpoint.measure import (
    Call,
    Cost,
    gathered,
    gradients_aside,
    measure,
    measure_offloaded,
    run_step,
    sharded_modules,
)
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.plan import CheckpointPlan, PlanBlock, PlanChoice, checkpoint_plan

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

# What a block may do with its activations, by name: what its checkpoint keeps, or None for no checkpoint.
CHOICES: dict[str, tuple[str, ...] | None] = {}
OFFLOADED: list[str] = []  # those of them where what is saved leaves the device
for _name, _recomputed, _keep, _offloaded in zip(*torch.ops.shoestring.checkpoint_choices(), strict=True):
    CHOICES[_name] = tuple(_keep) if _recomputed else None
    if _offloaded:
        OFFLOADED.append(_name)
LEAST_EXTRA = (
    1e-6  # seconds that a second run takes at least, whatever was measured: nothing is gained where all fits
)


@dataclass
class CheckpointReport:
    """What ``checkpoint_model`` chose for each block; ``undo`` makes the model as it was.

    Attributes:
        blocks: the name of each block, in order, and what it does: "keep" (nothing is recomputed), "recompute", or
            "keep attention" and the like (recomputed but for these operators).
        plan: with a budget, the plan with its predicted peak and time of one forward and backward; its first and last
            block are what comes before and behind the blocks.
        held_bytes: with a budget, what is held between forward and backward.
    """

    blocks: list[tuple[str, str]]
    plan: CheckpointPlan | None = None
    budget: int | None = None
    held_bytes: int | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Takes the checkpoints back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines: list[list[str]] = []
        for name, choice in self.blocks:
            if lines and lines[-1][2] == choice:
                lines[-1][1] = name
            else:
                lines.append([name, name, choice])
        text = [
            f"{first if first == last else f'{first} to {last}'}: {choice}" for first, last, choice in lines
        ]
        if self.plan is not None and self.budget is not None:
            text.append(
                f"predicted: {self.plan.peak_bytes / 2**20:.1f} MiB of activations (budget {self.budget / 2**20:.1f}), "
                f"{self.plan.seconds:.3g} s for forward and backward"
            )
        return "\n".join(text)


def checkpoint_model(
    model: nn.Module,
    blocks: Sequence[str | type | nn.Module] | None = None,
    *,
    keep: Sequence[Keep] = (),
    budget: int | str | None = None,
    example: Callable[[], Tensor] | Mapping[str, Any] | Sequence[Any] | None = None,
    offload: offload_activations | None = None,
) -> CheckpointReport:
    """Puts blocks of a model under :func:`checkpoint`, all of them or as many as a byte budget asks for.

    With ``budget`` and ``example``, each kind of block is measured once, alone, in each way of treating its activations
    (kept; recomputed; recomputed but for attention; ... and matrix products), and what is before and behind the blocks
    in one whole step. Then the choices with the least time are taken whose peak is within the budget: an exact dynamic
    program (:func:`checkpoint_plan`). Gradients are bitwise the same with every plan.

    Args:
        model: changed in place, by instance: state dict, copies and files know nothing of it. Before ``torch.compile``;
            before or after DDP and FSDP2's ``fully_shard``. With a budget, after them, all processes have to take part, and
            what FSDP2 gathers around the blocks counts as activations, so that budgets are kept with something to spare.
        blocks: names with wildcards (``"model.layers.*"``), classes or modules. None takes the outermost lists
            (``nn.ModuleList``, ``nn.Sequential``) of two and more modules of one class: a transformer's layers.
        keep: without a budget, what each block keeps, as in :func:`checkpoint`.
        budget: bytes, or such as "6GiB" or "500 MB", of activations: what forward and backward of one batch allocate
            at their peak, besides weights, gradients and optimizer state.
        example: one training step's forward: a function that returns the loss, or the model's arguments (a mapping or
            a sequence; the loss is ``.loss`` of what the model returns, or the sum of its first tensor). The batch has
            to be as large as those of training. Gradients and random state are as before afterwards.
        offload: with a budget, blocks may also move what they save (or, recomputed, their input) to the host or a disk,
            through this; how fast that goes is measured, and part of the plan.

    Raises:
        ValueError: no or wrong blocks, a budget without an example; blocks that have checkpoints already.
        RuntimeError: the budget is below what any plan needs; the message says the least.
    """
    modules = find_blocks(model, blocks)
    names = {module: name for name, module in modules.items()}
    if budget is None:
        if example is not None:
            raise ValueError(
                "checkpoint_model: example: expected with a budget only; give budget=, or leave it out"
            )
        undo = [treat(module, Treatment(keep)) for module in modules.values()]
        choice = "recompute" if not keep else "recompute but for " + ", ".join(map(str, keep))
        return CheckpointReport([(name, choice) for name in modules], _undo=undo)
    if keep:
        raise ValueError(
            "checkpoint_model: keep: expected without a budget, under which the plan chooses; leave one out"
        )
    if example is None:
        raise ValueError(
            "checkpoint_model: example: expected with a budget: a function that returns the loss of one batch"
        )
    try:
        limit = parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"checkpoint_model: budget: {error}") from None
    for name in sharded_modules(model):
        block = next((block for block in modules if name.startswith(block + ".")), None)
        if (
            block is not None
        ):  # processes may have plans of their own; only collectives within a block would mind
            raise ValueError(
                f"checkpoint_model: blocks: {name} is sharded by itself inside {block}: make the plan before fully_shard, "
                "or shard blocks as a whole"
            )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with gradients_aside(model):
        step, costs = _measure(model, list(modules.values()), _step(model, example), device, offload)
    planned = {kind: _block(cost) for kind, cost in costs.items()}
    held = step.before.held + sum(costs[kind]["recompute"].held for kind in step.kinds)
    after = replace(
        step.after,
        held=max(0, step.after.held - held),
        forward_bytes=max(0, step.after.forward_bytes - held),
        backward_bytes=max(0, step.after.backward_bytes - held),
    )
    most = sum(costs[kind]["keep"].held for kind in step.kinds)
    link: dict[str, Any] = offload.measure_link(most) if offload is not None else {}
    row = [_around("before", step.before), *(planned[kind] for kind in step.kinds), _around("behind", after)]
    plan = checkpoint_plan(row, limit, **link)
    undo, chosen, chosen_bytes = [], [], step.before.held + after.held
    for i, (module, name) in enumerate(zip(step.modules, plan.names[1:-1], strict=True), 1):
        treatment = Treatment(
            CHOICES[name], offload, moves=name in OFFLOADED, pending=plan.pending_bytes[i + 1]
        )
        if module is step.modules[-1]:  # backward begins when all copies are out, as planned
            stays = row[i].choices[plan.choices[i]].link_bytes <= treatment.pending
            treatment = replace(treatment, leaves=not stays, pending=0)
        undo.append(treat(module, treatment))
        chosen_bytes += row[i].choices[plan.choices[i]].bytes
        chosen.append((names[module], name))
    return CheckpointReport(chosen, plan, limit, chosen_bytes, undo)


def _measure(
    model: nn.Module,
    modules: list[nn.Module],
    step: Callable[[], Tensor],
    device: torch.device,
    offload: offload_activations | None,
) -> tuple[Any, dict[Any, dict[str, Cost]]]:
    undo = [treat(module, Treatment()) for module in modules]
    try:
        run_step(modules, step, device)  # the first makes what lasts: caches, workspaces, lazily built parts
        whole = run_step(modules, step, device)
    finally:
        for one in undo:
            one()
    costs: dict[Any, dict[str, Cost]] = {}
    for kind, call in whole.calls.items():
        module = whole.modules[whole.kinds.index(kind)]
        with gathered(model, module):
            costs[kind] = _measure_block(module, call, device, offload)
    return whole, costs


def _measure_block(
    module: nn.Module, call: Call, device: torch.device, offload: offload_activations | None
) -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    for name, kept in CHOICES.items():
        run = functools.partial(run_block, Treatment(kept), type(module).forward, module)
        if name in OFFLOADED:
            if offload is not None:
                alike = next(costs[one] for one in costs if CHOICES[one] == kept)
                costs[name] = replace(alike, held=measure_offloaded(run, call, device, offload))
            continue
        cost = measure(run, call, device)
        if name in ("keep", "recompute") or cost.held > costs["recompute"].held:
            costs[name] = cost  # the others: nothing to keep here
    return costs


def _block(costs: dict[str, Cost]) -> PlanBlock:
    kept = costs["keep"]
    choices = []
    for name, cost in costs.items():
        stays = next(
            other for one, other in costs.items() if CHOICES[one] == CHOICES[name]
        )  # without offload
        choices.append(replace(_choice(name, cost, kept), link_bytes=max(0, stays.held - cost.held)))
    return PlanBlock(kept.forward_seconds, kept.backward_seconds, choices)


def _choice(name: str, cost: Cost, kept: Cost) -> PlanChoice:
    extra = cost.forward_seconds + cost.backward_seconds - kept.forward_seconds - kept.backward_seconds
    return PlanChoice(
        name,
        bytes=cost.held,
        extra_seconds=0.0 if CHOICES.get(name) is None else max(LEAST_EXTRA, extra),
        forward_bytes=max(cost.forward_bytes, cost.held),
        backward_bytes=max(cost.backward_bytes, cost.held),
    )


def _around(name: str, cost: Cost) -> PlanBlock:
    return PlanBlock(
        max(0.0, cost.forward_seconds), max(0.0, cost.backward_seconds), [_choice(name, cost, cost)]
    )


def _step(model: nn.Module, example: Any) -> Callable[[], Tensor]:
    if callable(example):
        result: Callable[[], Tensor] = example
        return result

    def step() -> Tensor:
        result = model(**example) if isinstance(example, Mapping) else model(*example)
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        return (
            next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            .float()
            .sum()
        )

    return step


def parse_bytes(budget: int | str) -> int:
    """Bytes, given as a number or such as "6GiB" or "500 MB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B|)\s*", str(budget).upper())
    if not match or isinstance(budget, bool) or not 0 < float(match[1]) * UNITS[match[2]] < 1 << 63:
        raise ValueError(f'expected bytes or such as "6GiB" or "500 MB", received {budget!r}')
    return int(float(match[1]) * UNITS[match[2]])

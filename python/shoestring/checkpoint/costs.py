"""Measure what each treatment of a model's blocks costs, and give blocks the treatments of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.blocks import Treatment, cache_places, run_block, treat
from shoestring.checkpoint.measure import (
    RUNS,
    Call,
    Cost,
    GradientsAside,
    Step,
    gathered,
    measure,
    measure_offloaded,
    run_step,
)
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.planner import PlanBlock, PlanChoice
from shoestring.core.presence import weights_present


def _choices() -> tuple[Mapping[str, tuple[str, ...] | None], frozenset[str]]:
    """Return the operators that each treatment keeps, and the treatments that offload."""
    names, recomputed, keep, offloaded = torch.ops.shoestring._checkpoint_choices()
    kept_operators = {
        name: tuple(operators) if again else None
        for name, again, operators in zip(names, recomputed, keep, strict=True)
    }
    moved = (name for name, moves in zip(names, offloaded, strict=True) if moves)
    return MappingProxyType(kept_operators), frozenset(moved)


# CHOICES: the treatments of a block's activations. The key is the name of a treatment. The value lists the
# operators whose results the block's checkpoint keeps, or is None for no checkpoint. OFFLOADED: the names of
# treatments that offload the saved tensors.
CHOICES, OFFLOADED = _choices()
# Minimum cost of a recomputation in seconds. Measured costs may be 0 or negative, but a plan must not
# recompute without need.
LEAST_EXTRA = 1e-6


@dataclass
class ModelCosts:
    """A measured step of a model whose blocks are checkpointed, and the costs of its blocks.

    ``of_kind``: kind of a block -> name of a treatment -> costs. ``kept`` has the same for a step that keeps all
    gradients, as training does, if that was measured: the step, and for each kind the bytes by which the peak of its
    backward is higher. ``plain`` is the fastest such step without treatments, if one ran.
    """

    step: Step
    of_kind: dict[Any, dict[str, Cost]]
    kept: tuple[Step, dict[Any, int]] | None = None
    plain: Step | None = None

    @property
    def kinds(self) -> list[Any]:
        """The kinds of the blocks, in the order in which the step calls the first block of each."""
        return list(dict.fromkeys(self.step.kinds))

    def ends(self, step: Step) -> tuple[PlanBlock, PlanBlock]:
        """Return what a measured step runs before and after the blocks, as blocks with one treatment."""
        held = step.before.held + sum(self.of_kind[kind]["recompute"].held for kind in step.kinds)
        after = replace(
            step.after,
            held=max(0, step.after.held - held),
            forward_bytes=max(0, step.after.forward_bytes - held),
            backward_bytes=max(0, step.after.backward_bytes - held),
        )
        return _around("before", step.before), _around("behind", after)

    def slowdown(self, step: Step, treatment: str) -> float:
        """Return the time of a whole step whose blocks have a treatment over that of its parts, at least 1.

        A block that runs alone finds its tensors in caches, and the fastest of its runs counts.
        """
        parts = [step.before, step.after, *(self.of_kind[kind][treatment] for kind in step.kinds)]
        return max(1.0, step.seconds / sum(part.forward_seconds + part.backward_seconds for part in parts))

    def in_whole_steps(self) -> ModelCosts:
        """Return the costs with the times that the parts have in whole steps."""
        assert self.kept is not None
        treated = min(self.slowdown(step, "recompute") for step in (self.step, self.kept[0]))
        plain = treated if self.plain is None else self.slowdown(self.plain, "keep")
        of_kind = {
            kind: {
                name: cost.slower(plain if CHOICES[name] is None else treated) for name, cost in costs.items()
            }
            for kind, costs in self.of_kind.items()
        }
        step, kept = (
            replace(one, before=one.before.slower(plain), after=one.after.slower(plain))
            for one in (self.step, self.kept[0])
        )
        return replace(self, step=step, of_kind=of_kind, kept=(kept, self.kept[1]))

    def row(self) -> list[PlanBlock]:
        """Return all blocks of the step, from what runs before the blocks to what runs after them.

        Gradients count as those of a backward that frees each of them at once.
        """
        before, behind = self.ends(self.step)
        planned = {kind: _block(costs) for kind, costs in self.of_kind.items()}
        return [before, *(planned[kind] for kind in self.step.kinds), behind]

    def planned(self, gradients: Mapping[Any, int]) -> tuple[list[PlanBlock], list[PlanBlock]]:
        """Return the kinds of blocks for a planner of whole steps: before, behind, and each kind of the model's blocks.

        The first list is for a backward that frees each gradient at once, and the second one for a backward that
        keeps them.

        Args:
            gradients: the bytes of the gradients of a block, by its kind.
        """
        assert self.kept is not None
        kept_step, higher = self.kept
        blocks = [_block(self.of_kind[kind]) for kind in self.kinds]
        freed_ends, kept_ends = self.ends(self.step), self.ends(kept_step)
        before, behind = freed_ends
        freed = [before, replace(behind, gradient_bytes=self.step.left), *blocks]
        # At the end of backward there are the gradients of all blocks, which the planner adds by itself.
        later = kept_step.left + sum(gradients[kind] for kind in kept_step.kinds)
        [first] = kept_ends[0].choices
        [first_freed] = before.choices
        most = max(first_freed.backward_bytes, first.backward_bytes - later)
        kept_before = replace(kept_ends[0], choices=[replace(first, backward_bytes=most)])
        kept = [kept_before, replace(kept_ends[1], gradient_bytes=kept_step.left)]
        for kind, block in zip(self.kinds, blocks, strict=True):
            choices = [
                replace(choice, backward_bytes=choice.backward_bytes + higher[kind])
                for choice in block.choices
            ]
            kept.append(replace(block, choices=choices, gradient_bytes=gradients[kind]))
        return freed, kept


def measure_model(
    caller: str,
    model: nn.Module,
    modules: list[nn.Module],
    step: Callable[[], Tensor],
    device: torch.device,
    offload: offload_activations | None,
    *,
    runs: int = RUNS,
    aside: GradientsAside | None = None,
    room: int | None = None,
) -> ModelCosts:
    """Run steps whose blocks are checkpointed, and each kind of block alone with each treatment; return their costs.

    Args:
        caller: the function that begins error messages.
        model: the model.
        modules: its blocks.
        step: runs the forward of the model, and returns the loss.
        device: the device of the model.
        offload: if given, treatments that offload are measured, too.
        runs: how often each block runs.
        aside: what ``gradients_aside(model)`` has yielded, to measure a backward that keeps gradients, too, and steps
            without treatments.
        room: if given, steps without treatments run only if they hold at most so many bytes of activations.
    """
    undo = [treat(module, Treatment()) for module in modules]
    kept = None
    try:
        # this first step is not measured, because it creates caches, workspaces and lazy modules
        run_step(modules, step, device, caller)
        whole = run_step(modules, step, device, caller)
        if aside is not None:
            with aside.kept():
                kept = run_step(modules, step, device, caller)
            kept.calls.clear()
    finally:
        for one in undo:
            one()
    of_kind: dict[Any, dict[str, Cost]] = {}
    higher: dict[Any, int] = {}
    for kind, call in whole.calls.items():
        module = whole.modules[whole.kinds.index(kind)]
        with gathered(model, module), weights_present(module):
            of_kind[kind] = _measure_block(module, call, device, offload, runs)
            if aside is not None:
                with aside.kept():
                    cost = measure(_runner(module, None), call, device, 1)
                higher[kind] = max(0, cost.backward_bytes - of_kind[kind]["keep"].backward_bytes)
    costs = ModelCosts(whole, of_kind, None if kept is None else (kept, higher))
    if aside is not None and (room is None or sum(block.choices[0].bytes for block in costs.row()) <= room):
        with aside.kept():
            plain = [run_step(modules, step, device, caller) for _ in range(runs)]
        for step_found in plain:
            step_found.calls.clear()
        costs.plain = min(plain, key=lambda found: found.seconds)
    return costs


def treated_runner(module: nn.Module, treatment: str) -> Callable[..., Any]:
    """Return a function that runs a block with a treatment, but offloads nothing."""
    return _runner(module, CHOICES[treatment])


def _runner(module: nn.Module, operators: Any) -> Callable[..., Any]:
    """Return a function that runs a block with a checkpoint that keeps these operators, or without one for None."""
    forward = type(module).forward
    return functools.partial(run_block, Treatment(operators), forward, cache_places(forward), module)


def _measure_block(
    module: nn.Module, call: Call, device: torch.device, offload: offload_activations | None, runs: int
) -> dict[str, Cost]:
    """Return the costs of a block by treatment."""
    costs: dict[str, Cost] = {}
    for name, operators in CHOICES.items():
        run = _runner(module, operators)
        if name in OFFLOADED:
            if offload is not None:
                alike = next(costs[one] for one in costs if CHOICES[one] == operators)
                costs[name] = replace(alike, held=measure_offloaded(run, call, device, offload))
            continue
        cost = measure(run, call, device, runs)
        # Drop a treatment that holds no more bytes than "recompute", because the operators that it keeps do
        # not occur in this block.
        if name in ("keep", "recompute") or cost.held > costs["recompute"].held:
            costs[name] = cost
    return costs


def _block(costs: dict[str, Cost]) -> PlanBlock:
    """Return the costs of a block as the planner reads them."""
    keep = costs["keep"]
    choices = []
    for name, cost in costs.items():
        # CHOICES may hold two treatments that keep the same operators. The first of them does not offload.
        stays = next(other for one, other in costs.items() if CHOICES[one] == CHOICES[name])
        choices.append(replace(_choice(name, cost, keep), link_bytes=max(0, stays.held - cost.held)))
    return PlanBlock(keep.forward_seconds, keep.backward_seconds, choices)


def _choice(name: str, cost: Cost, keep: Cost) -> PlanChoice:
    """Return a treatment for the planner; its extra time is that beyond ``keep``."""
    extra = cost.forward_seconds + cost.backward_seconds - keep.forward_seconds - keep.backward_seconds
    return PlanChoice(
        name,
        bytes=cost.held,
        extra_seconds=0.0 if CHOICES.get(name) is None else max(LEAST_EXTRA, extra),
        forward_bytes=max(cost.forward_bytes, cost.held),
        backward_bytes=max(cost.backward_bytes, cost.held),
    )


def _around(name: str, cost: Cost) -> PlanBlock:
    """Return what runs before or after the blocks as a block with one treatment."""
    return PlanBlock(
        max(0.0, cost.forward_seconds), max(0.0, cost.backward_seconds), [_choice(name, cost, cost)]
    )


def apply_treatments(
    modules: Sequence[nn.Module],
    names: Sequence[str],
    pending: Sequence[int],
    links: Sequence[int],
    offload: offload_activations | None = None,
) -> list[Callable[[], None]]:
    """Give blocks their treatments by name; return functions that undo it.

    Args:
        modules: the blocks in the order of their calls.
        names: the treatment of each block.
        pending: for each block, the bytes of offloaded blocks whose copies to the host may be unfinished when the
            computation after the block begins.
        links: the bytes that each block offloads.
        offload: what offloads, if a treatment does.
    """
    undo = []
    for module, name, waiting, link in zip(modules, names, pending, links, strict=True):
        treatment = Treatment(CHOICES[name], offload, moves=name in OFFLOADED, pending=waiting)
        # Backward begins with the last block, after all copies to the host have ended. If the plan's limit of
        # bytes in flight permits it, the last block keeps its tensors instead of offloading them.
        if module is modules[-1]:
            treatment = replace(treatment, leaves=link > waiting, pending=0)
        undo.append(treat(module, treatment))
    return undo

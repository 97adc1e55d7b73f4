"""``checkpoint_model``: which blocks of a model are checkpointed, by name or under a byte budget."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpointing.blocks import Treatment, find_blocks, run_block, treat
from shoestring.checkpointing.function import Keep
from shoestring.checkpointing.measure import Cost, gradients_aside, measure, run_step, synchronize
from shoestring.checkpointing.offload import offload_activations
from shoestring.checkpointing.plan import CheckpointPlan, PlanBlock, PlanChoice, checkpoint_plan

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

# What a block may do with its activations, by name: what its checkpoint keeps, or None for no checkpoint.
CHOICES: dict[str, tuple[str, ...] | None] = {
    "keep": None,
    "recompute": (),
    "keep attention": ("attention",),
    "keep attention and products": ("attention", "products"),
}
# The same where what is saved leaves the device, by the choice that it is made of.
OFFLOADED = {"offload": "keep", "recompute, input offloaded": "recompute"}
LEAST_EXTRA = 1e-6  # seconds that a second run takes at least, whatever was measured: nothing is gained where all fits
LINK_BYTES = 16 << 20  # moved to see how fast the link is


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
        lines = []
        for name, choice in self.blocks:
            if lines and lines[-1][2] == choice:
                lines[-1][1] = name
            else:
                lines.append([name, name, choice])
        text = [f"{first if first == last else f'{first} to {last}'}: {choice}" for first, last, choice in lines]
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
        model: changed in place, by instance: state dict, copies and files know nothing of it. Before FSDP2's
            ``fully_shard``, DDP or ``torch.compile``.
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
            raise ValueError("checkpoint_model: example: expected with a budget only; give budget=, or leave it out")
        undo = [treat(module, Treatment(keep)) for module in modules.values()]
        choice = "recompute" if not keep else "recompute but for " + ", ".join(map(str, keep))
        return CheckpointReport([(name, choice) for name in modules], _undo=undo)
    if keep:
        raise ValueError("checkpoint_model: keep: expected without a budget, under which the plan chooses; leave one out")
    if example is None:
        raise ValueError("checkpoint_model: example: expected with a budget: a function that returns the loss of one batch")
    try:
        limit = parse_bytes(budget)
    except ValueError as error:
        raise ValueError(f"checkpoint_model: budget: {error}") from None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with gradients_aside(model):
        step, costs = _measure(list(modules.values()), _step(model, example), device)
    planned = {kind: _block(cost, offload is not None) for kind, cost in costs.items()}
    held = step.before.held + sum(costs[kind]["recompute"].held for kind in step.kinds)
    after = replace(
        step.after,
        held=max(0, step.after.held - held),
        forward_bytes=max(0, step.after.forward_bytes - held),
        backward_bytes=max(0, step.after.backward_bytes - held),
    )
    link = _link(offload, device) if offload is not None else {}
    row = [_around("before", step.before), *(planned[kind] for kind in step.kinds), _around("behind", after)]
    plan = checkpoint_plan(row, limit, **link)
    undo, chosen, chosen_bytes = [], [], step.before.held + after.held
    for module, kind, name in zip(step.modules, step.kinds, plan.names[1:-1], strict=True):
        away = offload if name in OFFLOADED else None
        treatment = Treatment(CHOICES[OFFLOADED.get(name, name)], away, ends_layer=module is not step.modules[-1])
        undo.append(treat(module, treatment))
        chosen_bytes += 0 if away is not None else costs[kind][name].held
        chosen.append((names[module], name))
    return CheckpointReport(chosen, plan, limit, chosen_bytes, undo)


def _measure(
    modules: list[nn.Module], step: Callable[[], Tensor], device: torch.device
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
        costs[kind] = {}
        for name, kept in CHOICES.items():
            cost = measure(functools.partial(run_block, Treatment(kept), type(module).forward, module), call, device)
            if name in ("keep", "recompute") or cost.held > costs[kind]["recompute"].held:
                costs[kind][name] = cost  # the others: nothing to keep here
    return whole, costs


def _block(costs: dict[str, Cost], offload: bool) -> PlanBlock:
    kept = costs["keep"]
    choices = [_choice(name, cost, kept) for name, cost in costs.items()]
    for name, made_of in OFFLOADED.items() if offload else ():
        choice = next(choice for choice in choices if choice.name == made_of)
        choices.append(replace(choice, name=name, bytes=0, link_bytes=choice.bytes))
    return PlanBlock(kept.forward_seconds, kept.backward_seconds, choices)


def _link(offload: offload_activations, device: torch.device) -> dict[str, float]:
    """Bytes a second to where ``offload`` moves them, and back, by moving some."""
    seconds = [0.0, 0.0]
    for _ in range(2):  # the first makes slabs and files
        x = torch.rand(LINK_BYTES // 4, device=device, requires_grad=True) * 1
        before = offload.statistics()["copied_out"]
        synchronize(device)
        seconds[0] = -time.perf_counter()
        with offload:
            y = x.exp()  # saves its result; this itself is quick beside the copy
        offload.mark()  # its layer is over, and is not the last
        while offload.statistics()["copied_out"] == before and seconds[0] + time.perf_counter() < 10:
            time.sleep(1e-4)
        seconds[0] += time.perf_counter()
        edge, grad = torch.autograd.graph.get_gradient_edge(y), torch.ones_like(y)
        del y
        synchronize(device)
        seconds[1] = -time.perf_counter()
        torch.autograd.grad([edge], [x], [grad])
        synchronize(device)
        seconds[1] += time.perf_counter()
    return {"out_bytes_per_second": LINK_BYTES / seconds[0], "in_bytes_per_second": LINK_BYTES / seconds[1]}


def _choice(name: str, cost: Cost, kept: Cost) -> PlanChoice:
    extra = cost.forward_seconds + cost.backward_seconds - kept.forward_seconds - kept.backward_seconds
    return PlanChoice(
        name,
        bytes=cost.held,
        extra_seconds=0.0 if cost is kept else max(LEAST_EXTRA, extra),
        forward_bytes=max(cost.forward_bytes, cost.held),
        backward_bytes=max(cost.backward_bytes, cost.held),
    )


def _around(name: str, cost: Cost) -> PlanBlock:
    return PlanBlock(max(0.0, cost.forward_seconds), max(0.0, cost.backward_seconds), [_choice(name, cost, cost)])


def _step(model: nn.Module, example: Any) -> Callable[[], Tensor]:
    if callable(example):
        return example

    def step() -> Tensor:
        result = model(**example) if isinstance(example, Mapping) else model(*example)
        loss = getattr(result, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        return next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)).float().sum()

    return step


def parse_bytes(budget: int | str) -> int:
    """Bytes, given as a number or such as "6GiB" or "500 MB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B|)\s*", str(budget).upper())
    if not match or isinstance(budget, bool) or float(match[1]) <= 0:
        raise ValueError(f'expected bytes or such as "6GiB" or "500 MB", received {budget!r}')
    return int(float(match[1]) * UNITS[match[2]])

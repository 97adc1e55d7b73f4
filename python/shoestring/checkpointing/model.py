"""``checkpoint_model``: which blocks of a model are checkpointed, by name or under a byte budget."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpointing.function import Keep, checkpoint
from shoestring.checkpointing.measure import Cost, gradients_aside, measure, run_step
from shoestring.checkpointing.plan import CheckpointPlan, PlanBlock, PlanChoice, checkpoint_plan
from shoestring.patching.instances import PLAIN, derive

CACHES = ("past_key_values", "past_key_value", "layer_past")  # a second run would write to them again
CHECKPOINTED = "_shoestring_checkpointed"  # of a derived class
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

# What a block may do with its activations, by name: the operators that a checkpoint keeps, or None for no checkpoint.
CHOICES: dict[str, tuple[str, ...] | None] = {
    "keep": None,
    "recompute": (),
    "keep attention": ("attention",),
    "keep attention and products": ("attention", "products"),
}


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

    Raises:
        ValueError: no or wrong blocks, a budget without an example; keyword arguments that cannot be recomputed.
        RuntimeError: the budget is below what any plan needs; the message says the least.
    """
    modules = _find(model, blocks)
    names = {module: name for name, module in modules.items()}
    if budget is None:
        if example is not None:
            raise ValueError("checkpoint_model: example: expected with a budget only; give budget=, or leave it out")
        undo = [_apply(module, keep) for module in modules.values()]
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
    planned = [
        PlanBlock(
            costs[kind]["keep"].forward_seconds,
            costs[kind]["keep"].backward_seconds,
            [_choice(name, cost, costs[kind]["keep"]) for name, cost in costs[kind].items()],
        )
        for kind in step.kinds
    ]
    held = step.before.held + sum(costs[kind]["recompute"].held for kind in step.kinds)
    after = replace(
        step.after,
        forward_bytes=max(0, step.after.forward_bytes - held),
        backward_bytes=max(0, step.after.backward_bytes - held),
    )
    plan = checkpoint_plan([_around("before", step.before), *planned, _around("behind", after)], limit)
    undo, chosen, chosen_bytes = [], [], step.before.held
    for module, kind, name in zip(step.modules, step.kinds, plan.names[1:-1], strict=True):
        chosen_bytes += costs[kind][name].held
        undo.append(_apply(module, CHOICES[name]))
        chosen.append((names[module], name))
    return CheckpointReport(chosen, plan, limit, chosen_bytes, undo)


def _measure(
    modules: list[nn.Module], step: Callable[[], Tensor], device: torch.device
) -> tuple[Any, dict[Any, dict[str, Cost]]]:
    undo = [_apply(module, ()) for module in modules]
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
            cost = measure(functools.partial(_run, kept, type(module).forward, module), call, device)
            if name in ("keep", "recompute") or cost.held > costs[kind]["recompute"].held:
                costs[kind][name] = cost  # the others: nothing to keep here
    return whole, costs


def _choice(name: str, cost: Cost, kept: Cost) -> PlanChoice:
    extra = cost.forward_seconds + cost.backward_seconds - kept.forward_seconds - kept.backward_seconds
    return PlanChoice(
        name,
        bytes=cost.held,
        extra_seconds=max(0.0, extra),
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


def _find(model: nn.Module, blocks: Sequence[str | type | nn.Module] | None) -> dict[str, nn.Module]:
    if blocks is None:
        found = _lists(model, "")
        if not found:
            raise ValueError(
                "checkpoint_model: blocks: found no list of modules of one class; name the blocks, "
                'such as blocks=["encoder.layers.*"]'
            )
        return found
    if isinstance(blocks, (str, type, nn.Module)):
        blocks = [blocks]
    found = {}
    for wanted in blocks:
        matching = {name: module for name, module in model.named_modules() if name and _matches(name, module, wanted)}
        if not matching:
            raise ValueError(f"checkpoint_model: blocks: {wanted!r} matches no module of {type(model).__name__}")
        found |= matching
    for name in found:
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise ValueError(f"checkpoint_model: blocks: {name} is inside {outer}: name the one or the other")
    return found


def _matches(name: str, module: nn.Module, wanted: str | type | nn.Module) -> bool:
    if isinstance(wanted, str):  # as far as the pattern goes: "layers.*" is not "layers.0.mlp"
        return name.count(".") == wanted.count(".") and fnmatch.fnmatchcase(name, wanted)
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _lists(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        parts = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(parts) > 1
        if is_list and len({getattr(part, PLAIN, type(part)) for part in parts}) == 1 and any(True for _ in parts[0].parameters()):
            found |= {f"{prefix}{name}.{inner}": part for inner, part in child.named_children()}
        else:
            found |= _lists(child, f"{prefix}{name}.")
    return found


def _apply(module: nn.Module, keep: Sequence[Keep] | None) -> Callable[[], None]:
    """Gives one module a forward that is checkpointed; ``keep`` None: that writes to no cache, no more."""
    if getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"checkpoint_model: {type(module).__name__} has gradient checkpointing already; "
            "call model.gradient_checkpointing_disable() first"
        )
    if getattr(module, CHECKPOINTED, False):
        raise ValueError("checkpoint_model: blocks: these have checkpoints already; call undo() of their report first")
    return derive(module, {CHECKPOINTED: True, "forward": _forward(type(module).forward, keep)})


def _forward(original: Callable[..., Any], keep: Sequence[Keep] | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return _run(keep, original, self, *args, **kwargs)

    return forward


def _run(
    keep: Sequence[Keep] | None, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    for name in CACHES:
        if kwargs.get(name) is not None:
            kwargs[name] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    if keep is None:
        return original(module, *args, **kwargs)
    return checkpoint(functools.partial(original, module, **kwargs), *args, keep=keep)

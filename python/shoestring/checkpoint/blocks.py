"""Select a model's blocks, and give them a forward that keeps, recomputes or offloads activations."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.checkpoint.function import Keep, checkpoint
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.instances import PLAIN, derive

# Names of forward arguments that hold key-value caches. run_block() replaces them by None, because a
# recomputation would write to the caches again.
CACHES = ("past_key_values", "past_key_value", "layer_past")
# name of a class attribute that marks modules that treat() has changed
CHECKPOINTED = "_shoestring_checkpointed"


@dataclass(frozen=True)
class Treatment:
    """How the activations of one block of a model are treated.

    Attributes:
        keep: the operators whose results the block's checkpoint keeps; None for no checkpoint.
        offload: the offload_activations object that this block or an earlier block uses; None without
            offload.
        moves: whether the block's saved tensors are offloaded (with a checkpoint, only its input).
        leaves: whether the copies of the block's saved tensors to the host start when its forward ends. This
            may be False for the last block, with which backward begins.
        pending: maximum bytes of offloaded blocks whose copies to the host may be unfinished when the
            computation after this block begins.
    """

    keep: Sequence[Keep] | None = ()
    offload: offload_activations | None = None
    moves: bool = False
    leaves: bool = True
    pending: int = 0


def find_blocks(
    model: nn.Module,
    blocks: Sequence[str | type | nn.Module] | None,
    caller: str = "checkpoint_model",
    argument: str = "blocks",
) -> dict[str, nn.Module]:
    """Return the modules that ``blocks`` selects, by name; for None, those of the model's outermost lists."""
    if blocks is None:
        modules = listed_blocks(model)
        if not modules:
            raise ValueError(
                f"{caller}: blocks: found no list of modules of one class; name the blocks, "
                'such as blocks=["encoder.layers.*"]'
            )
        return modules
    if isinstance(blocks, (str, type, nn.Module)):
        blocks = [blocks]
    modules = {}
    for pattern in blocks:
        matching = {
            name: module for name, module in model.named_modules() if name and _matches(name, module, pattern)
        }
        if not matching:
            raise ValueError(f"{caller}: {argument}: {pattern!r} matches no module of {type(model).__name__}")
        modules |= matching
    for name in modules:
        outer = next((other for other in modules if name.startswith(other + ".")), None)
        if outer is not None:
            raise ValueError(f"{caller}: {argument}: {name} is inside {outer}: name only one of them")
    return modules


def _matches(name: str, module: nn.Module, pattern: str | type | nn.Module) -> bool:
    # a wildcard matches one part of a dotted name: "layers.*" does not match "layers.0.mlp"
    if isinstance(pattern, str):
        return name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)
    return isinstance(module, pattern) if isinstance(pattern, type) else module is pattern


def listed_blocks(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules of a model's lists of modules of one class, by name; none of a model without such a list."""
    blocks: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        parts = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(parts) > 1
        if (
            is_list
            and len({getattr(part, PLAIN, type(part)) for part in parts}) == 1
            and any(True for _ in parts[0].parameters())
        ):
            blocks |= {f"{prefix}{name}.{inner}": part for inner, part in child.named_children()}
        else:
            blocks |= listed_blocks(child, f"{prefix}{name}.")
    return blocks


def treat(module: nn.Module, treatment: Treatment) -> Callable[[], None]:
    """Give a module a forward that keeps, recomputes or offloads its activations; return an undo function."""
    if getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"checkpoint_model: {type(module).__name__} has gradient checkpointing already; "
            "call model.gradient_checkpointing_disable() first"
        )
    if getattr(module, CHECKPOINTED, False):
        raise ValueError(
            "checkpoint_model: blocks: these have checkpoints already; call undo() of their report first"
        )
    return derive(module, {CHECKPOINTED: True, "forward": _forward(type(module).forward, treatment)})


def _forward(original: Callable[..., Any], treatment: Treatment) -> Callable[..., Any]:
    """Return a forward that gives the activations of the block their treatment while gradients are on."""
    caches = cache_places(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return run_block(treatment, original, caches, self, *args, **kwargs)

    return forward


def cache_places(original: Callable[..., Any]) -> frozenset[int]:
    """Return which positional arguments of a block's forward are key-value caches, as GPT-2 passes them."""
    names = list(inspect.signature(original).parameters)[1:]
    return frozenset(i for i, name in enumerate(names) if name in CACHES)


def run_block(
    treatment: Treatment,
    original: Callable[..., Any],
    caches: frozenset[int],
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of a block, with its activations as ``treatment`` says and without key-value caches.

    ``caches`` is the result of ``cache_places``.
    """
    args = tuple(None if i in caches else argument for i, argument in enumerate(args))
    for name in CACHES:
        if kwargs.get(name) is not None:
            kwargs[name] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    offload = treatment.offload
    with offload if offload is not None and treatment.moves else nullcontext():
        if treatment.keep is None:
            result = original(module, *args, **kwargs)
        else:
            result = checkpoint(functools.partial(original, module, **kwargs), *args, keep=treatment.keep)
    if offload is not None:
        if treatment.moves and treatment.leaves:
            offload.mark()
        offload.wait(treatment.pending)
    return result

"""Selection of a model's blocks, and the forward that keeps, recomputes or offloads a block's activations."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.checkpoint.function import Keep, checkpoint
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.instances import PLAIN, derive

# Arguments that hold key-value caches. They are dropped, since a second run would write to them again.
CACHES = ("past_key_values", "past_key_value", "layer_past")
CHECKPOINTED = "_shoestring_checkpointed"  # class attribute of modules that treat() has changed


@dataclass(frozen=True)
class Treatment:
    """How a block's activations are treated.

    Attributes:
        keep: the operators that the block's checkpoint keeps; None for no checkpoint.
        offload: the offload object that this block or an earlier one uses; None without offload.
        moves: whether the block's saved tensors (under a checkpoint, its input) are offloaded.
        leaves: whether offloading starts at once. False for a last block, with which backward begins.
        pending: the bytes of offloaded blocks that may still be in flight when the computation after this
            block begins.
    """

    keep: Sequence[Keep] | None = ()
    offload: offload_activations | None = None
    moves: bool = False
    leaves: bool = True
    pending: int = 0


def find_blocks(model: nn.Module, blocks: Sequence[str | type | nn.Module] | None) -> dict[str, nn.Module]:
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
        matching = {
            name: module for name, module in model.named_modules() if name and _matches(name, module, wanted)
        }
        if not matching:
            raise ValueError(
                f"checkpoint_model: blocks: {wanted!r} matches no module of {type(model).__name__}"
            )
        found |= matching
    for name in found:
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise ValueError(f"checkpoint_model: blocks: {name} is inside {outer}: name the one or the other")
    return found


def _matches(name: str, module: nn.Module, wanted: str | type | nn.Module) -> bool:
    if isinstance(wanted, str):  # a wildcard stays within one level: "layers.*" does not match "layers.0.mlp"
        return name.count(".") == wanted.count(".") and fnmatch.fnmatchcase(name, wanted)
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _lists(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        parts = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(parts) > 1
        if (
            is_list
            and len({getattr(part, PLAIN, type(part)) for part in parts}) == 1
            and any(True for _ in parts[0].parameters())
        ):
            found |= {f"{prefix}{name}.{inner}": part for inner, part in child.named_children()}
        else:
            found |= _lists(child, f"{prefix}{name}.")
    return found


def treat(module: nn.Module, treatment: Treatment) -> Callable[[], None]:
    """Give one module a forward with this treatment. Return a function that restores the module."""
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
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return run_block(treatment, original, self, *args, **kwargs)

    return forward


def run_block(
    treatment: Treatment, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a block with a treatment, without caches."""
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

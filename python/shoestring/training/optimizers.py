"""Build the optimizers of a run from its options."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoestring.core.errors import InputError
from shoestring.optim import (
    APOLLO,
    CAME,
    LAMB,
    SGD,
    Adafactor,
    AdamW,
    AdEMAMix,
    APOLLOMini,
    GaLore,
    Lion,
    Muon,
    ScheduleFreeAdamW,
)
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.low_rank import LowRankOptimizer
from shoestring.training.config import ROUNDING, LoopConfig, StepConfig
from shoestring.training.options import LOW_RANK

Own = LowMemoryOptimizer | LowRankOptimizer
Group = dict[str, Any]  # a parameter group: the parameters and their options
OPTIMIZERS: dict[str, type[Own]] = {
    "adamw": AdamW,
    "lion": Lion,
    "sgd": SGD,
    "ademamix": AdEMAMix,
    "schedule-free-adamw": ScheduleFreeAdamW,
    "lamb": LAMB,
    "adafactor": Adafactor,
    "came": CAME,
    "muon": Muon,  # the choice "muon" uses Muon for matrices of hidden layers, and AdamW for other parameters
    "galore": GaLore,
    "apollo": APOLLO,
    "apollo-mini": APOLLOMini,
}
# options of the classes that commands set by other means than --optimizer-arg
SET_ELSEWHERE = {"params", "lr", "weight_decay", "base_optimizer", "max_grad_norm", "options"}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def classes(model: nn.Module, name: str) -> list[tuple[type[Own], list[Group]]]:
    """Return the optimizer classes of ``--optimizer``, each with the groups of parameters that it steps."""
    params = trained(model)
    if name != "muon" and name not in LOW_RANK:
        return [(OPTIMIZERS[name], [{"params": params}])]
    ends = [module.weight for module in _embeddings(model)]
    matrices = [p for p in params if p.ndim == 2 and not any(p is end for end in ends)]
    others = [p for p in params if not any(p is matrix for matrix in matrices)]
    if name in LOW_RANK:
        groups: list[Group] = [{"params": matrices}, {"params": others, "rank": None}]
        return [(OPTIMIZERS[name], [group for group in groups if group["params"]])]
    return [(kind, [{"params": stepped}]) for kind, stepped in ((Muon, matrices), (AdamW, others)) if stepped]


def _embeddings(model: Any) -> list[Any]:
    tables = [
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    return [module for module in tables if module is not None]


def decayed(groups: list[Group], weight_decay: float) -> list[Group]:
    """Split parameter groups into groups with weight decay, of matrices, and without it, of norms and biases."""
    split_groups = []
    for group in groups:
        split_groups += [
            group | {"params": [p for p in group["params"] if p.ndim >= 2], "weight_decay": weight_decay},
            group | {"params": [p for p in group["params"] if p.ndim < 2], "weight_decay": 0.0},
        ]
    return [group for group in split_groups if group["params"]]


def make_optimizers(model: nn.Module, config: LoopConfig, clips: bool) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a run, which together step all trained parameters of the model.

    For plain runs, it is PyTorch's fused AdamW. ``clips``: the optimizer alone knows the norm of
    all gradients, so it clips.

    Raises:
        InputError: an option does not fit the optimizer.
        RuntimeError: the folder or the space of ``--offload nvme:DIR`` cannot be used.
    """
    if config.baseline:
        groups = decayed([{"params": trained(model)}], config.weight_decay)
        return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)]
    return [
        build(kind, groups, _of_run(kind, config, clips) | options, config)
        for kind, groups, options in described(model, config, config.weight_decay)
    ]


def described(
    model: nn.Module, config: StepConfig, weight_decay: float = 0.0
) -> Iterator[tuple[type[Own], list[Group], Group]]:
    """Yield class, parameter groups and options of each optimizer: those of storage, and ``--optimizer-arg``."""
    storage_options = {"state_format": config.optimizer_state, "weight_rounding": ROUNDING[config.weights]}
    for number, (kind, groups) in enumerate(classes(model, config.optimizer)):
        # AdamW beside Muon takes no --optimizer-arg.
        user_options = _arguments(kind, config) if number == 0 else {}
        yield kind, decayed(groups, weight_decay), storage_options | user_options


def _of_run(kind: type[Own], config: LoopConfig, clips: bool) -> dict[str, Any]:
    """Return the options of an optimizer that other options of the run decide."""
    options: dict[str, Any] = {"lr": config.lr}
    if kind is AdamW or config.optimizer in LOW_RANK:
        options |= {"betas": config.betas, "eps": config.eps}
    if kind is Muon:  # with this option, Muon takes the learning rate of AdamW
        options["adjust_lr_fn"] = "match_rms_adamw"
    if config.optimizer not in LOW_RANK:
        options |= {"offload": config.place, "step_in_backward": config.step_in_backward}
    if clips:
        options["max_grad_norm"] = config.clip or float("inf")
    return options


def check_optimizer(config: LoopConfig) -> None:
    """Raise InputError if ``--optimizer-arg`` does not fit the optimizer. Needs no model."""
    if config.optimizer_arg:
        kind = OPTIMIZERS[config.optimizer]
        build(kind, [{"params": [nn.Parameter(torch.zeros(2, 2))]}], _arguments(kind, config), config)


def build(kind: type[Own], groups: list[Group], options: dict[str, Any], config: StepConfig) -> Own:
    """Build an optimizer; raise InputError if an option does not fit it."""
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        arguments = " ".join(config.optimizer_arg or ())
        reason = str(error)
        # Other errors are such as the comparison of a number with a text.
        if not any(reason.startswith(f"{each.__name__}: ") for each in (kind, AdamW)):
            reason = (
                f"expected a value of the type in shoestring.optim.{kind.__name__}'s signature, got another"
            )
        raise InputError(f"--optimizer {config.optimizer} {arguments}".rstrip() + f": {reason}") from None


def _arguments(kind: type[Own], config: StepConfig) -> dict[str, Any]:
    """Return the options that ``--optimizer-arg`` sets, among those of the optimizer and its base optimizer."""
    kinds = (kind, AdamW) if issubclass(kind, LowRankOptimizer) else (kind,)
    every = dict.fromkeys(name for each in kinds for name in inspect.signature(each).parameters)
    names = [name for name in every if name not in SET_ELSEWHERE]
    options: dict[str, Any] = {}
    for argument in config.optimizer_arg or ():
        name, equals, text = argument.partition("=")
        if not equals or name not in names:
            raise InputError(
                f"--optimizer-arg: expected NAME=VALUE, where NAME is one of {', '.join(names)} "
                f"(--optimizer {config.optimizer}); got {argument}"
            )
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            options[name] = text
    return options

"""Build the optimizers of a run from its options."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import torch
from torch import nn

from shoestring.core.errors import InputError
from shoestring.optim import CAME, LAMB, SGD, Adafactor, AdamW, AdEMAMix, Lion, Muon, ScheduleFreeAdamW
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.training.config import ROUNDING, LoopConfig, StepConfig
from shoestring.training.formulas import trained

OPTIMIZERS: dict[str, type[LowMemoryOptimizer]] = {
    "adamw": AdamW,
    "lion": Lion,
    "sgd": SGD,
    "ademamix": AdEMAMix,
    "schedule-free-adamw": ScheduleFreeAdamW,
    "lamb": LAMB,
    "adafactor": Adafactor,
    "came": CAME,
    "muon": Muon,  # the choice "muon" uses Muon for matrices of hidden layers, and AdamW for other parameters
}
# options of the classes that commands set by other means than --optimizer-arg
SET_ELSEWHERE = {"params", "lr", "weight_decay"}


def classes(model: nn.Module, name: str) -> list[tuple[type[LowMemoryOptimizer], list[nn.Parameter]]]:
    """Return the optimizer classes of ``--optimizer``, each with the trained parameters that it steps."""
    params = trained(model)
    if name != "muon":
        return [(OPTIMIZERS[name], params)]
    ends = [module.weight for module in _embeddings(model)]
    matrices = [p for p in params if p.ndim == 2 and not any(p is end for end in ends)]
    others = [p for p in params if not any(p is matrix for matrix in matrices)]
    return [(kind, own) for kind, own in ((Muon, matrices), (AdamW, others)) if own]


def _embeddings(model: Any) -> list[Any]:
    found = [
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    return [module for module in found if module is not None]


def parameter_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay for matrices and without it for norms and biases."""
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def stored_options(config: StepConfig) -> dict[str, Any]:
    """Return the options of the optimizer classes that decide how state and weights are stored."""
    return {"state": config.optimizer_state, "weights": ROUNDING[config.weights]}


def make_optimizers(model: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a run, which together step all trained parameters of the model.

    For plain runs, it is PyTorch's fused AdamW.

    Raises:
        InputError: an option does not fit the optimizer.
        RuntimeError: the folder or the space of ``--offload nvme:DIR`` cannot be used.
    """
    if config.plain:
        groups = parameter_groups(trained(model), config.weight_decay)
        return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)]
    options = stored_options(config) | {"offload": config.place, "step_in_backward": config.step_in_backward}
    if config.step_in_backward:  # the norm of all gradients is known to the optimizer alone
        options["max_grad_norm"] = config.clip or float("inf")
    made: list[torch.optim.Optimizer] = []
    for kind, params in classes(model, config.optimizer):
        own = _rule_options(kind, config) if not made else {}
        made.append(_make(kind, parameter_groups(params, config.weight_decay), options | own, config))
    return made


def check_optimizer(config: LoopConfig) -> None:
    """Raise InputError if ``--optimizer-arg`` does not fit the optimizer. Needs no model."""
    if config.optimizer_arg:
        kind = OPTIMIZERS[config.optimizer]
        options = stored_options(config) | _rule_options(kind, config)
        _make(kind, [{"params": [nn.Parameter(torch.zeros(2, 2))]}], options, config)


def _make(
    kind: type[LowMemoryOptimizer], groups: list[dict[str, Any]], options: dict[str, Any], config: LoopConfig
) -> LowMemoryOptimizer:
    try:
        return kind(groups, **({"lr": config.lr} | options))
    except (TypeError, ValueError) as error:
        given = " ".join(config.optimizer_arg or ())
        reason = str(error)
        if not reason.startswith(f"{kind.__name__}: "):  # such as a comparison of a number with a text
            reason = (
                f"expected a value of the type in shoestring.optim.{kind.__name__}'s signature, got another"
            )
        raise InputError(f"--optimizer {config.optimizer} {given}".rstrip() + f": {reason}") from None


def _rule_options(kind: type[LowMemoryOptimizer], config: LoopConfig) -> dict[str, Any]:
    """Return the options of the update rule: the run's, and those of ``--optimizer-arg``."""
    names = [name for name in inspect.signature(kind).parameters if name not in SET_ELSEWHERE | {"options"}]
    options: dict[str, Any] = {}
    if kind is AdamW:
        options = {"betas": config.betas, "eps": config.eps}
    elif kind is Muon:  # with this option, Muon takes the learning rate of AdamW
        options = {"adjust_lr_fn": "match_rms_adamw"}
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

"""Parameters that are trained from a later step on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoestring.core.module_argument import check_module
from shoestring.core.name_patterns import matching


class Unfreezing:
    """Freeze parameters until a given step.

    Which parameters are trained is a pure function of the step, so a run that resumes trains the same ones::

        unfreezing = Unfreezing(model, {"head.*": 0, "layers.3.*": 500, "*": 1000})
        for batch in data:
            ...
            optimizer.step()
            optimizer.zero_grad()
            unfreezing.step()

    A frozen parameter has ``requires_grad=False`` and no gradient. Backward does not compute its gradient, and the
    optimizers of this package and of PyTorch allocate no state for it. They may be created with all parameters.
    Batch norm layers in training mode update their statistics also while their weights are frozen.

    ``save_training`` needs ``frozen=True``, so that the file holds the weights that are frozen at that step.

    Create DistributedDataParallel with ``find_unused_parameters=True`` before this object: it does not reduce the
    gradients of parameters that are frozen when it is created. The same holds for ``parallelize`` with "ddp" and
    "zero1", whose forward refuses parameters that it does not reduce; "zero3" and "hsdp" take both orders. With "zero1"
    and "zero2", make an optimizer of its own for the parameters of each stage. ``torch.compile`` does not notice that a parameter
    requires a gradient now, so all compiled code of the process is compiled again when the set changes.

    Args:
        model: the model.
        schedule: for patterns of parameter names, the first step in which the parameters are trained. Steps count
            from 0. Of several patterns that match, the earliest step counts. Parameters without a pattern do not
            change. A pattern is one of ``fnmatch``: ``*`` stands for any text, dots included.

    Raises:
        ValueError: a pattern matches no parameter, a step is negative, or DistributedDataParallel was created
            around frozen parameters. Nothing has changed then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> unfreezing = shoestring.optim.Unfreezing(model, {"1.*": 0, "0.*": 2})
        >>> model[0].weight.requires_grad
        False
        >>> unfreezing.step(2)
        >>> model[0].weight.requires_grad
        True
        >>> unfreezing.trained(0)
        ['1.weight', '1.bias']
    """

    def __init__(self, model: nn.Module, schedule: Mapping[str, int]) -> None:
        check_module("Unfreezing", model)
        parameters = dict(model.named_parameters())
        first: dict[str, int] = {}
        for pattern, step in schedule.items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(
                    f"Unfreezing: schedule: expected whole numbers of at least 0, received {step!r} for {pattern!r}"
                )
            for name in matching("Unfreezing", "schedule", pattern, list(parameters)):
                first[name] = min(step, first.get(name, step))
        self._model = model
        self._entries = [
            (name, parameter, first[name]) for name, parameter in parameters.items() if name in first
        ]
        if isinstance(model, DistributedDataParallel):
            for name, parameter, _ in self._entries:
                if not parameter.requires_grad:
                    raise ValueError(
                        "Unfreezing: model: expected DistributedDataParallel around parameters that require "
                        f"gradients, received {name} without. Create it before Unfreezing."
                    )
        self._step = 0
        self.step(0)

    @property
    def current_step(self) -> int:
        """The step whose parameters are set."""
        return self._step

    def trained(self, step: int) -> list[str]:
        """Return the names of the parameters in the schedule that are trained in a step."""
        return [name for name, _, first in self._entries if first <= step]

    def step(self, step: int | None = None) -> None:
        """Set the parameters of step ``step``, or of the next step.

        Raises:
            ValueError: the step is negative.
        """
        step = self._step + 1 if step is None else step
        if step < 0:
            raise ValueError(f"Unfreezing: step: expected a number of at least 0, received {step}")
        self._step = step
        has_changed = False
        now = dict(self._model.named_parameters())  # fully_shard replaces parameters
        for name, original, first in self._entries:
            parameter = now.get(name, original)
            if parameter.requires_grad != (first <= step):
                parameter.requires_grad_(first <= step)
                has_changed = True
            if first > step:
                parameter.grad = None
        if has_changed and "torch._dynamo" in sys.modules:
            torch.compiler.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"step": current_step}``."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict()`` has returned, also in C++, and set the parameters of that step.

        Raises:
            ValueError: the state has no step. Nothing has changed then.
        """
        if "step" not in state_dict:
            raise ValueError(
                f"Unfreezing: load_state_dict: expected a number called step, received {sorted(state_dict)}"
            )
        self.step(int(state_dict["step"]))

"""Compute the time of a model's passes on a machine that need not be here, from the operators that run in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from shoestring.checkpoint.costs import CHOICES, LEAST_EXTRA, ModelCosts, treated_runner
from shoestring.checkpoint.measure import Call, copied_arguments, run_backward
from shoestring.checkpoint.planner import PlanBlock
from shoestring.planning.machine import Machine
from shoestring.planning.roofline import ModuleTime, Work


@dataclass
class PassSeconds:
    """Times of a pass: forward and backward of each kind of block by treatment, and of all outside of the blocks.

    ``flops``: floating-point operations of the matrix products of the whole pass without treatments.
    """

    of_kind: dict[Any, dict[str, tuple[float, float]]]
    outside: tuple[float, float]
    flops: int

    def replaced(self, costs: ModelCosts, blocks: list[PlanBlock]) -> list[PlanBlock]:
        """Return blocks in the order of ``ModelCosts.planned`` with these times in place of the measured ones."""
        before, behind, *kinds = blocks
        forward, backward = self.outside
        result = [
            replace(before, forward_seconds=0.0, backward_seconds=0.0),
            replace(behind, forward_seconds=forward, backward_seconds=backward),
        ]
        for kind, block in zip(costs.kinds, kinds, strict=True):
            seconds = self.of_kind[kind]
            forward, backward = seconds["keep"]
            choices = [
                replace(
                    choice,
                    extra_seconds=0.0
                    if CHOICES[choice.name] is None
                    else max(LEAST_EXTRA, sum(seconds[choice.name]) - forward - backward),
                )
                for choice in block.choices
            ]
            result.append(replace(block, forward_seconds=forward, backward_seconds=backward, choices=choices))
        return result


def predict_pass(
    model: nn.Module, costs: ModelCosts, step: Callable[[], Tensor], machine: Machine, device: torch.device
) -> PassSeconds:
    """Return the times of a pass on a machine. The pass runs on this one, and its operators are counted.

    Args:
        model: the model.
        costs: the pass as it was measured here, with the arguments of its blocks.
        step: runs the forward of the pass, and returns the loss.
        machine: the rates.
        device: the device of the model here.
    """
    of_kind = {}
    for kind, treatments in costs.of_kind.items():
        module, call = costs.step.modules[costs.step.kinds.index(kind)], costs.step.calls[kind]
        of_kind[kind] = {
            name: _block_seconds(treated_runner(module, name), call, machine, device) for name in treatments
        }
    whole = _counted(model, machine, step, nullcontext())
    inside = [of_kind[kind]["keep"] for kind in costs.step.kinds]
    totals = (whole.forward_seconds, whole.backward_seconds)
    forward, backward = (
        max(0.0, total - sum(parts)) for total, parts in zip(totals, zip(*inside, strict=True), strict=True)
    )
    return PassSeconds(of_kind, (forward, backward), whole.forward_flops + whole.backward_flops)


def _block_seconds(
    run: Callable[..., Any], call: Call, machine: Machine, device: torch.device
) -> tuple[float, float]:
    args, kwargs = copied_arguments(call, torch.zeros((), requires_grad=True))
    counted = _counted(
        nn.Module(), machine, lambda: run(*args, **kwargs), torch.autocast(device.type, **call.autocast)
    )
    return counted.forward_seconds, counted.backward_seconds


def _counted(
    model: nn.Module, machine: Machine, run: Callable[[], Any], context: AbstractContextManager[Any]
) -> ModuleTime:
    """Return the time and the work of forward and backward of a function on a machine."""
    # Products of 16-bit tensors have the rate of their own dtype, as those under autocast.
    work = Work(model, machine, "fp32")
    with work, context:
        result = run()
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    edges = [get_gradient_edge(output) for output in outputs]
    upstream = [torch.ones_like(output) for output in outputs]
    del result, outputs
    work.is_backward = True
    with work:
        run_backward(edges, upstream)
    return work.times[""]

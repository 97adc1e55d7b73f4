"""An update in place, with every rounding of weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import ReferenceArguments, StepArguments, reference_step


def apply_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    *,
    lr: float,
    weight_decay: float,
    **arguments: Unpack[StepArguments],
) -> None:
    """``p = p (1 - lr weight_decay) - lr update``, in place, for every parameter that has an update, in one pass.

    What an optimizer that makes its updates in some other way ends with: it gives it stochastic rounding, the exact
    remainder, and numbers that the device reads. There are no moments.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: the updates, one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step
            stay as they are.
        step: (parameters), fp32: steps taken; incremented. Random bits follow from it.
        lr: what an update is multiplied by.
        weight_decay: times lr, the share of a weight that is taken away before the update.
        **arguments: see ``StepArguments``; what it says of gradients holds for updates.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.apply_(params, grads, step, lr=lr, weight_decay=weight_decay, **arguments)


def apply_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    *,
    lr: float,
    weight_decay: float,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``apply_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, update: Tensor) -> tuple[Tensor]:
        return (p * (1 - lr * weight_decay) - lr * update,)

    reference_step(rule, params, grads, step, [], lr=lr, **arguments)

"""An in-place weight update that supports every rounding mode of the optimizers."""

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
    """Apply updates in place: ``p = p (1 - lr weight_decay) - lr update``.

    One pass covers all parameters that have an update. Use this function as the last part of an optimizer
    that computes its updates in another way. It supports stochastic rounding, exact weights by a stored
    remainder, and scalar arguments that the device reads. It has no moments.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: the updates, one for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the
            parameter and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place. The
            random bits of stochastic rounding depend on the step.
        lr: factor of the update.
        weight_decay: decoupled weight decay, applied before the update.
        **arguments: see ``StepArguments``. Its options for gradients apply to the updates.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.
    """
    torch.ops.shoestring._apply_(params, grads, step, lr=lr, weight_decay=weight_decay, **arguments)


def apply_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    *,
    lr: float,
    weight_decay: float,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """Compute the same weight update as ``apply_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, update: Tensor) -> tuple[Tensor]:
        return (p * (1 - lr * weight_decay) - lr * update,)

    reference_step(rule, params, grads, step, [], lr=lr, **arguments)

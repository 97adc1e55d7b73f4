"""Lion over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import Arena, ReferenceArguments, StepArguments, reference_step


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of Lion, in place, on every parameter that has a gradient, in one pass over all of them.

    A weight moves by lr, up or down: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, and then
    ``m = beta2 m + (1 - beta2) g`` ("Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675). The state of
    all parameters lies in flat arenas as for ``adamw_``. A NaN gradient spoils its weight. An infinite one moves it by
    lr, but spoils its moment; with 8-bit state both spoil the moments of a block of 256, but of no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr: what a weight moves by.
        beta1, beta2: the share of the moment in the update and in the new moment, [0, 1).
        weight_decay: times lr, the share of a weight that is taken away before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.lion_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        **arguments,
    )


def lion_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``lion_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        p = p * (1 - lr * weight_decay) - lr * (m * beta1 + g * (1 - beta1)).sign()
        return p, m * beta2 + g * (1 - beta2)

    reference_step(
        rule, params, grads, step, [Arena(exp_avg, exp_avg_scale, True, beta2)], lr=lr, **arguments
    )

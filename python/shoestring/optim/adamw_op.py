"""AdamW over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import Arena, ReferenceArguments, StepArguments, reference_step


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    The state of all parameters lies in flat arenas, in the order of ``params``, each beginning at a multiple of 256
    elements. ``shoestring.optim.AdamW`` manages them. The update uses the new moments before they are quantised. A NaN
    or infinite gradient spoils its weight as in PyTorch, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale, exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``; decay comes before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.

    With other than fp32 state on a GPU an update takes its root and its reciprocal from hardware instructions, which are
    wrong by a unit or two in the last place, and eps is at least 1.1e-19.
    """
    torch.ops.shoestring.adamw_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        **arguments,
    )


def adamw_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``adamw_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        p = p * (1 - lr * weight_decay)
        return p - lr / bias1 * (m / (v.sqrt() / bias2**0.5 + eps)), m, v

    arenas = [Arena(exp_avg, exp_avg_scale, True, beta1), Arena(exp_avg_sq, exp_avg_sq_scale, False, beta2)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)

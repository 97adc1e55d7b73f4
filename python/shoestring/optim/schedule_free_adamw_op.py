"""Schedule-Free AdamW over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import Arena, ReferenceArguments, StepArguments, reference_step


def schedule_free_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    offset: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    warmup_steps: int = 0,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of Schedule-Free AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    "The Road Less Scheduled" (arXiv 2405.15682) has three sequences of weights: z takes the steps, x is its average,
    and gradients are taken at y, between them. Here y is the parameter, and ``offset`` is z - y. With
    ``u = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y``, where v is the mean of squared gradients, and c the
    step's share of the average,

        y <- y + c offset + lr (beta1 (1 - c) - 1) u,    offset <- (1 - c) (offset - lr beta1 u),

    which is ``z <- z - lr u``, ``x <- (1 - c) x + c z``, ``y = beta1 x + (1 - beta1) z``. The weights for evaluation
    are ``x = y - offset (1 - beta1) / beta1``. In step t up to ``warmup_steps`` = W, the learning rate is t / W times
    lr, and c is proportional to the square of it: ``c = 6 t / ((t + 1) (2 t + 1))``; from there on each step counts as
    much as the last of the warm-up, whatever lr is. Without a warm-up c is 1 / t.

    The state of all parameters lies in flat arenas as for ``adamw_``. A NaN or infinite gradient spoils its weight, and
    with codes its block of 256, but no other.

    Args:
        params: y; fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        offset: (elements of the arena): fp32 where ``exp_avg_sq`` is, else bf16, rounded stochastically: codes are
            further apart than it moves in a step.
        exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, beta2, eps: as for ``adamw_``.
        beta1: of x in y; above 0 and below 1.
        weight_decay: of y, a part of the update; at least 0.
        warmup_steps: at least 0.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.schedule_free_adamw_(
        params,
        grads,
        step,
        offset,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        **arguments,
    )


def schedule_free_adamw_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    offset: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    warmup_steps: int = 0,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``schedule_free_adamw_`` in plain PyTorch, a tensor at a time."""

    def share(t: int) -> float:
        weights = [min(i / max(warmup_steps, 1), 1) ** 2 for i in range(1, t + 1)]
        return weights[-1] / sum(weights)

    def rule(lr: float, t: int, y: Tensor, g: Tensor, offset: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        c, lr = share(t), lr * min(t / max(warmup_steps, 1), 1)
        v = v * beta2 + g * g * (1 - beta2)
        u = g / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps) + weight_decay * y
        return y + c * offset + lr * (beta1 * (1 - c) - 1) * u, (1 - c) * (offset - lr * beta1 * u), v

    arenas = [Arena(offset, None, True, beta1), Arena(exp_avg_sq, exp_avg_sq_scale, False, beta2)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)

"""Running means of gradients over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step


def ema_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    beta: float,
    nesterov: bool = False,
    lr: float = 1.0,
    **arguments: Unpack[StepArguments],
) -> None:
    """Overwrites params with lr times the running mean of gradients, in one pass over all of them.

    ``m = beta m + (1 - beta) g``; then ``p = lr m``, or with Nesterov's momentum ``p = lr (beta m + (1 - beta) g)``.
    What an optimizer can begin with that makes its update from the mean: it keeps the mean in few bits, and finds it in
    fp32.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; only written.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        beta: the share of the mean in the new mean, [0, 1).
        nesterov: look ahead, to where the same gradient again would move the mean.
        lr: what the result is multiplied by.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.ema_(
        params, grads, step, exp_avg, exp_avg_scale, beta=beta, nesterov=nesterov, lr=lr, **arguments
    )


def ema_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    beta: float,
    nesterov: bool = False,
    lr: float = 1.0,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``ema_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = m * beta + g * (1 - beta)
        return lr * (m * beta + g * (1 - beta) if nesterov else m), m

    reference_step(
        rule, params, grads, step, [ReferenceArena(exp_avg, exp_avg_scale, True, beta)], lr=lr, **arguments
    )

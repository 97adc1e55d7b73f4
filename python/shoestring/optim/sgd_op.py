"""SGD with momentum over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import Arena, ReferenceArguments, StepArguments, reference_step


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of SGD with momentum, in place, on every parameter that has a gradient, in one pass over all of them.

    What ``torch.optim.SGD`` does: ``g = g + weight_decay p``; the buffer becomes g in a parameter's first step (from
    ``step`` 0), and ``momentum buffer + (1 - dampening) g`` in later ones; then ``p = p - lr buffer``, or with
    Nesterov's momentum ``p = p - lr (g + momentum buffer)``. The state of all parameters lies in flat arenas as
    for ``adamw_``. A NaN or infinite gradient spoils its weight, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        momentum_buffer: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        momentum_buffer_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``. momentum is above 0: without it
            there is no state to keep. nesterov needs dampening 0.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.sgd_(
        params,
        grads,
        step,
        momentum_buffer,
        momentum_buffer_scale,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        **arguments,
    )


def sgd_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``sgd_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        g = g + weight_decay * p
        buffer = g if step == 1 else buffer * momentum + g * (1 - dampening)
        return p - lr * (g + momentum * buffer if nesterov else buffer), buffer

    arenas = [Arena(momentum_buffer, momentum_buffer_scale, True, momentum)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)

"""SGD with momentum over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.ops.quantize_8bit import places, read_moment, step_numbers, write_moment


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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of SGD with momentum, in place, on every parameter that has a gradient, in one pass over all of them.

    What ``torch.optim.SGD`` does: ``g = g + weight_decay p``; the buffer becomes g in a parameter's first step (from
    ``step`` 0), and ``momentum buffer + (1 - dampening) g`` in later ones; then ``p = p - lr buffer``, or with
    Nesterov's momentum ``p = p - lr (g + momentum buffer)``. The state of all parameters lies in flat arenas as
    for ``adamw_``. A NaN or infinite gradient spoils its weight, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32, rounding to nearest.
        grads: one for each parameter, its shape and dtype, or None: the parameter and its step stay as they are.
        step: (parameters), fp32: steps taken; incremented.
        momentum_buffer: (elements of the arena): uint8 codes, or fp32.
        momentum_buffer_scale: (elements of the arena / 256), fp32; None for fp32 state.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``. momentum is above 0: without it
            there is no state to keep. nesterov needs dampening 0.
        maximize: ascend instead.
        lr_tensor, grad_scale, clip_coef, found_inf: numbers that the device reads, as in ``adamw_``.

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
        maximize=maximize,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        found_inf=found_inf,
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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``sgd_`` in plain PyTorch, a tensor at a time."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr, factor = step_numbers(lr, lr_tensor, grad_scale, clip_coef)
    for i, (param, grad, where) in enumerate(zip(params, grads, places(params), strict=True)):
        if grad is None:
            continue
        buffer = read_moment(momentum_buffer, momentum_buffer_scale, where, signed=True)

        step[i] += 1
        p = param.float().flatten()
        g = (-grad if maximize else grad).float().flatten() * factor + weight_decay * p
        buffer = g if step[i] == 1 else buffer * momentum + g * (1 - dampening)
        p = p - lr * (g + momentum * buffer if nesterov else buffer)
        param.copy_(p.view(param.shape))

        write_moment(momentum_buffer, momentum_buffer_scale, where, buffer, signed=True)

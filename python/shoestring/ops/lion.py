"""Lion over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.ops.quantize_8bit import places, read_moment, step_numbers, write_moment


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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of Lion, in place, on every parameter that has a gradient, in one pass over all of them.

    A weight moves by lr, up or down: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, and then
    ``m = beta2 m + (1 - beta2) g`` ("Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675). The state of
    all parameters lies in flat arenas as for ``adamw_``. A NaN gradient spoils its weight. An infinite one moves it by
    lr, but spoils its moment; with 8-bit state both spoil the moments of a block of 256, but of no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32, rounding to nearest.
        grads: one for each parameter, its shape and dtype, or None: the parameter and its step stay as they are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg: (elements of the arena): uint8 codes, or fp32.
        exp_avg_scale: (elements of the arena / 256), fp32; None for fp32 state.
        lr: what a weight moves by.
        beta1, beta2: the share of the moment in the update and in the new moment, [0, 1).
        weight_decay: times lr, the share of a weight that is taken away before the update.
        maximize: ascend instead.
        lr_tensor, grad_scale, clip_coef, found_inf: numbers that the device reads, as in ``adamw_``.

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
        maximize=maximize,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        found_inf=found_inf,
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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``lion_`` in plain PyTorch, a tensor at a time."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr, factor = step_numbers(lr, lr_tensor, grad_scale, clip_coef)
    for i, (param, grad, where) in enumerate(zip(params, grads, places(params), strict=True)):
        if grad is None:
            continue
        m = read_moment(exp_avg, exp_avg_scale, where, signed=True)

        step[i] += 1
        g = (-grad if maximize else grad).float().flatten() * factor
        p = param.float().flatten() * (1 - lr * weight_decay)
        p = p - lr * (m * beta1 + g * (1 - beta1)).sign()
        m = m * beta2 + g * (1 - beta2)
        param.copy_(p.view(param.shape))

        write_moment(exp_avg, exp_avg_scale, where, m, signed=True)

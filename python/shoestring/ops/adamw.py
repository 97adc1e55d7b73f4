"""AdamW over flat arenas of state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.ops.quantize_8bit import STATE_BLOCK as STATE_BLOCK  # the state of optimizers is made of these
from shoestring.ops.quantize_8bit import places, read_moment, step_numbers, write_moment

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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    The state of all parameters lies in flat arenas, in the order of ``params``, each beginning at a multiple of 256
    elements. ``shoestring.optim.AdamW`` manages them. The update uses the new moments before they are quantised. A NaN
    or infinite gradient spoils its weight as in PyTorch, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32, rounding to nearest.
        grads: one for each parameter, its shape and dtype, or None: the parameter and its step stay as they are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): uint8 codes, or fp32.
        exp_avg_scale, exp_avg_sq_scale: (elements of the arena / 256), fp32; None for fp32 state.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``; decay comes before the update.
        maximize: ascend instead.
        lr_tensor: in place of lr; its sign is not checked. This and what follows are one fp32 element each, on the
            parameters' device: a GPU reads them itself, so the host does not wait, and a CUDA graph replays the step.
        grad_scale: gradients are divided by it.
        clip_coef: gradients are multiplied by it.
        found_inf: where it is not zero, nothing changes.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.

    With 8-bit state on a GPU an update takes its root and its reciprocal from hardware instructions, which are wrong by
    a unit or two in the last place, and eps is at least 1.1e-19.
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
        maximize=maximize,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        clip_coef=clip_coef,
        found_inf=found_inf,
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
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``adamw_`` in plain PyTorch, a tensor at a time."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr, factor = step_numbers(lr, lr_tensor, grad_scale, clip_coef)
    for i, (param, grad, where) in enumerate(zip(params, grads, places(params), strict=True)):
        if grad is None:
            continue
        m = read_moment(exp_avg, exp_avg_scale, where, signed=True)
        v = read_moment(exp_avg_sq, exp_avg_sq_scale, where, signed=False)

        step[i] += 1
        g = (-grad if maximize else grad).float().flatten() * factor
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        bias1, bias2 = 1 - beta1 ** step[i].item(), 1 - beta2 ** step[i].item()
        p = param.float().flatten() * (1 - lr * weight_decay)
        p = p - lr / bias1 * (m / (v.sqrt() / bias2**0.5 + eps))
        param.copy_(p.view(param.shape))

        write_moment(exp_avg, exp_avg_scale, where, m, signed=True)
        write_moment(exp_avg_sq, exp_avg_sq_scale, where, v, signed=False)

"""Steps with the gradients of a scaled loss, for optimizers of every class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def scaled_step(name: str, optimizer: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """Step an optimizer with gradients divided by ``scale``, unless ``found_inf`` is above 0.

    If the optimizer supports this, nothing waits for the device. Otherwise ``found_inf`` is read, and ``.grad`` is
    divided in place.

    Raises:
        ValueError: a gradient to divide in place is fp16. ``name`` begins the message.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        scaling: Any = optimizer
        scaling.grad_scale, scaling.found_inf = scale, found_inf
        try:
            optimizer.step()
        finally:
            del scaling.grad_scale, scaling.found_inf
        return
    if found_inf.item():
        return
    if scale is not None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            if grad.dtype == torch.float16:
                raise ValueError(
                    f"{name}: grad: expected fp32 or bf16 gradients to unscale, received torch.float16"
                )
        for grad in grads:
            grad.mul_((1 / scale).to(grad.device))
    optimizer.step()

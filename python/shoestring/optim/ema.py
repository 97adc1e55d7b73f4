"""Running means of gradients, stored in flat tensors and optionally quantised."""

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
    """Overwrite parameters with lr times the running mean of their gradients, all parameters in one pass.

    With the gradient g, the running mean becomes ``m = beta m + (1 - beta) g``. The parameter becomes ``p =
    lr m``, or with Nesterov's momentum ``p = lr (beta m + (1 - beta) g)``. Use this as the first part of an
    optimizer that derives its update from the running mean. The mean may be stored quantised, but ``params``
    receive it unquantised.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape. They are only written.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg: the running means of all parameters in one flat tensor, the arena. Each parameter starts at a
            multiple of 256 elements. fp32 or bf16 values, (elements of the arena); or uint8 codes, one 8-bit
            or two 4-bit codes per byte.
        exp_avg_scale: fp32 scales of the codes, or None without codes. The shape is (elements of the arena /
            256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit codes.
        beta: the weight of the old mean in the new mean, in [0, 1).
        nesterov: write the mean that one more step with the same gradient would give.
        lr: factor of the result.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.
    """
    torch.ops.shoestring._ema_(
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
    """Compute the same running means as ``ema_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = m * beta + g * (1 - beta)
        return lr * (m * beta + g * (1 - beta) if nesterov else m), m

    reference_step(
        rule, params, grads, step, [ReferenceArena(exp_avg, exp_avg_scale, True, beta)], lr=lr, **arguments
    )

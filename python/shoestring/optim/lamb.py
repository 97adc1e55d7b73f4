"""LAMB whose moments are stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments
from shoestring.optim.whole import WholeTensorOptimizer


def lamb_(
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
    """Take one LAMB step in place on every parameter that has a gradient, one after another.

    LAMB adds weight decay to Adam's update u and rescales the sum r to the norm of the parameter p: ``r = u +
    weight_decay p``; ``p = p - lr |p| / |r| r``. If ``|p|`` or ``|r|`` is 0, the ratio ``|p| / |r|`` counts
    as 1. This is algorithm 2 of "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv 1904.00962), with the identity for phi. Temporary memory: at most 12 bytes per element of one
    parameter at a time (4 without weight decay). A NaN or infinite element of a gradient spoils the whole
    parameter.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg, exp_avg_sq: the moments of all parameters, each in one flat tensor, the arena. Each parameter
            starts at a multiple of 256 elements. fp32 or bf16 values, (elements of the arena); or uint8
            codes, one 8-bit or two 4-bit codes per byte.
        exp_avg_scale, exp_avg_sq_scale: fp32 scales of the codes, or None without codes. The shape is
            (elements of the arena / 256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit
            codes.
        lr: learning rate: the norm of an update, divided by the norm of the parameter.
        beta1, beta2, eps, weight_decay: as for ``adamw_``, except that the norm of the update includes the
            decay.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    Example:
        >>> param, grad, step = torch.ones(1000), torch.ones(1000), torch.zeros(1)
        >>> mean, variance = torch.zeros(1024), torch.zeros(1024)
        >>> rule = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0)
        >>> shoestring.ops.lamb_([param], [grad], step, mean, None, variance, None, **rule)
        >>> torch.allclose(param, torch.tensor(0.9))
        True
    """
    torch.ops.shoestring.lamb_(
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


class LAMB(WholeTensorOptimizer):
    """LAMB (arXiv 1904.00962), for large batches, with 8-bit moments: 2.03 bytes per parameter instead of 8.

    For each parameter, Adam's update plus weight decay is rescaled to the norm of the parameter. The learning
    rate is thus relative to the norm of the parameter.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 520 bytes per block of 256 elements become 296 with 4-bit
    state, 1024 with bf16 and 2048 with fp32. ``weight_rounding="remainder"`` adds 512. A step takes at
    most 12 bytes of temporary memory per element of one parameter at a time.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: the update includes ``weight_decay`` times the weights before it is rescaled.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a parameter or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler and ``grad_norm`` work as documented for ``AdamW``.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.LAMB(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        8324
    """

    _moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
    _core_class = "LAMB"
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

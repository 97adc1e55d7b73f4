"""Lion whose moment is stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments


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
    **arguments: Unpack[StepArguments],
) -> None:
    """Take one Lion step in place, in one pass over all parameters that have a gradient.

    Each weight moves up or down by lr: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``,
    with the gradient g and the moment m. Then ``m = beta2 m + (1 - beta2) g`` ("Symbolic Discovery of
    Optimization Algorithms", arXiv 2302.06675). The state of all parameters lies in flat arenas as for
    ``adamw_``. A NaN in a gradient spoils the weight and the moment of its element. An infinite gradient
    moves the weight by lr, but spoils the moment. With 8-bit state, either one spoils the moments of all 256
    elements of its block, but of no other block.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg: the moment m: fp32 or bf16 values, (elements of the arena); or uint8 codes, one 8-bit or two
            4-bit codes per byte.
        exp_avg_scale: fp32 scales of the codes, or None without codes. The shape is (elements of the arena /
            256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit codes.
        lr: learning rate, the distance that each weight moves.
        beta1, beta2: the weight of the old moment in the update (beta1) and in the new moment (beta2), each
            in [0, 1).
        weight_decay: decoupled weight decay, applied before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    Example:
        >>> param, grad, step = torch.ones(1000), torch.ones(1000), torch.zeros(1)
        >>> rule = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
        >>> shoestring.ops.lion_([param], [grad], step, torch.zeros(1024), None, **rule)
        >>> torch.allclose(param, torch.tensor(0.9))
        True
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
        **arguments,
    )


class Lion(LowMemoryOptimizer):
    """Lion (arXiv 2302.06675) with an 8-bit moment: 1.02 bytes per parameter instead of 4.

    Each weight moves up or down by lr: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``,
    with the gradient g and the moment m. Then ``m = beta2 m + (1 - beta2) g``. Use a learning rate 3 to 10
    times smaller than AdamW's, and a weight decay larger by the same factor.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 260 bytes per block of 256 elements become 160 with 4-bit
    state, 512 with bf16 and 1024 with fp32. ``weight_rounding="remainder"`` adds 512.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        betas: two numbers in [0, 1): the weight of the old moment in the update, and in the new moment.
        weight_decay: decoupled weight decay, applied before the update.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` work as documented for ``AdamW``.
    ``state[p]`` holds ``step, exp_avg, exp_avg_scale``. ``load_state_dict`` also reads bitsandbytes'
    ``Lion8bit``.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        4164
    """

    _moments = (Moment("exp_avg", signed=True),)
    _core_class = "Lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)

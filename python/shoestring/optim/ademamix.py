"""AdEMAMix whose first and second moments are stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments


def ademamix_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_slow: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    t_alpha: int | None = None,
    t_beta3: int | None = None,
    **arguments: Unpack[StepArguments],
) -> None:
    """Take one AdEMAMix step in place, in one pass over all parameters that have a gradient.

    AdEMAMix ("The AdEMAMix Optimizer", arXiv 2409.03137) is AdamW with a second, slow mean of gradients: ``p
    = p (1 - lr weight_decay) - lr (m / (1 - beta1^t) + alpha s) / (sqrt(v / (1 - beta2^t)) + eps)``. Here p
    is the parameter, and t counts its steps. m is the running mean of gradients with decay beta1, and s the
    slow mean of gradients with decay beta3. v is the running mean of squared gradients with decay beta2. The
    state of all parameters lies in flat arenas as for ``adamw_``. A NaN or infinite gradient spoils its own
    weight. With quantised state it spoils all 256 elements of its block, but no other block.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg, exp_avg_sq: fp32 or bf16 values, (elements of the arena); or uint8 codes, one 8-bit or two
            4-bit codes per byte.
        exp_avg_scale, exp_avg_sq_scale: fp32 scales of the codes, or None without codes. The shape is
            (elements of the arena / 256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit
            codes.
        exp_avg_slow: (elements of the arena): fp32 if the other moments are fp32, else bf16 with stochastic
            rounding. The slow mean moves less per step than one quantisation level, so 8-bit or 4-bit codes
            of the slow mean would never change.
        lr, beta1, beta2, eps, weight_decay: as for ``adamw_``.
        beta3: the weight of the old slow mean in the new slow mean, in [0, 1).
        alpha: factor of the slow mean in the update, at least 0.
        t_alpha: the number of steps in which alpha rises linearly from 0. None means that alpha is constant.
        t_beta3: the number of steps in which the decay of the slow mean rises from beta1 to beta3, so that
            its half-life grows linearly. None means that the decay is beta3 from the start.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    Example:
        >>> param, grad, step = torch.ones(1000), torch.ones(1000), torch.zeros(1)
        >>> fast, slow, square = torch.zeros(1024), torch.zeros(1024), torch.zeros(1024)
        >>> rule = dict(lr=0.1, beta1=0.9, beta2=0.999, beta3=0.99, alpha=5.0, eps=1e-8, weight_decay=0.0)
        >>> shoestring.ops.ademamix_([param], [grad], step, fast, None, slow, square, None, **rule)
        >>> torch.allclose(param, torch.tensor(1 - 0.1 * (1 + 5.0 * 0.01)))
        True
    """
    torch.ops.shoestring.ademamix_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_slow,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        beta3=beta3,
        alpha=alpha,
        eps=eps,
        weight_decay=weight_decay,
        t_alpha=t_alpha,
        t_beta3=t_beta3,
        **arguments,
    )


class AdEMAMix(LowMemoryOptimizer):
    """AdEMAMix (arXiv 2409.03137) with low-memory state: 4.03 bytes per parameter instead of 12.

    AdEMAMix is AdamW with a second, slow mean of gradients. The slow mean takes 16 bits per parameter, and
    each of the other two moments 8 bits. The update adds ``alpha`` times the slow mean to the first mean.

    Memory: ``sum(ceil(n / 256) * 1032 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 1032 bytes per block of 256 elements become 808 with 4-bit
    state, 1536 with bf16 and 3072 with fp32. ``weight_rounding="remainder"`` adds 512. The slow mean moves
    less per step than one quantisation level. If the other moments are 8-bit or 4-bit, the slow mean is
    therefore bf16 with stochastic rounding, which is exact on average.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        betas: three numbers in [0, 1): decay of the running mean of the gradient, of the squared gradient,
            and of the slow mean of the gradient.
        alpha: factor of the slow mean in the update.
        t_alpha: the number of steps in which alpha rises linearly from 0. None means that alpha is constant.
        t_beta3: the number of steps in which the decay of the slow mean rises from the first to the third
            beta. The half-life of the mean then grows linearly. None means that the decay is the third beta
            from the start.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, applied before the update.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` work as documented for ``AdamW``.
    ``state[p]`` holds the entries of ``AdamW`` and ``exp_avg_slow``, which never has a scale.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.AdEMAMix(model.parameters(), lr=1e-3, alpha=5.0)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg_slow"].dtype
        torch.bfloat16
    """

    _moments = (
        Moment("exp_avg", signed=True),
        Moment("exp_avg_slow", signed=True, long=True),
        Moment("exp_avg_sq", signed=False),
    )
    _core_class = "AdEMAMix"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        own = dict(lr=lr, betas=betas, alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3)
        super().__init__(params, own | dict(eps=eps, weight_decay=weight_decay), **options)

"""AdEMAMix whose first and second moments are stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions


class AdEMAMix(LowMemoryOptimizer):
    """AdEMAMix (arXiv 2409.03137) with low-memory state: 4.03 bytes per parameter instead of 12.

    AdEMAMix is AdamW with a second, slow mean of gradients: ``p = p (1 - lr weight_decay) - lr (m / (1 -
    beta1^t) + alpha s) / (sqrt(v / (1 - beta2^t)) + eps)``. Here p is the parameter, and t counts its steps. m and
    s are the running means of gradients with decays beta1 and beta3, and v is that of squared gradients with decay
    beta2. The slow mean s takes 16 bits per parameter, and each of the other two moments 8 bits.

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
        defaults = dict(lr=lr, betas=betas, alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3)
        super().__init__(params, defaults | dict(eps=eps, weight_decay=weight_decay), **options)

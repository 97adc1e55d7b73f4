"""Lion whose moment is stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions


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

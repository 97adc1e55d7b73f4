"""CAME, whose running mean of updates is stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.whole import WholeTensorOptimizer


class CAME(WholeTensorOptimizer):
    """CAME (arXiv 2307.02047): Adafactor with smaller steps where updates differ from their mean.

    The rule is that of the authors' implementation, for a parameter p with the gradient g:

    - v, the running mean of ``g^2 + eps[0]``, is factored: the product of its means over rows and over columns (of
      the last two dimensions), divided by the mean of the row means.
    - The update is ``u = g / sqrt(v)``, divided by ``max(1, rms(u) / clip_threshold)``. m is the running mean of u.
    - s, the instability, is the running mean of ``(u - m)^2 + eps[1]`` and is factored like v.
    - ``p = p (1 - lr weight_decay) - lr m / sqrt(s)``.

    For parameters with fewer than two dimensions, v is stored in full, and m replaces ``m / sqrt(s)``. No running
    mean has a bias correction. A NaN or infinite element of a gradient spoils the whole parameter.

    Memory:

    - 8 bytes per row and per column of a matrix. A parameter with more than two dimensions is a batch of
      matrices.
    - 4 bytes per element of parameters with fewer than two dimensions, and 4 bytes per parameter.
    - 1.02 bytes per element for the mean of updates, if it is stored in 8 bits.
    - During a step, 8 bytes per element of one parameter at a time.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``. In the first steps, updates
            are about ten times larger than AdamW's, so use a warm-up.
        eps: two numbers above 0. The first is added to the squared gradients, the second to the squared
            differences between updates and their mean.
        clip_threshold: above 0. An update with a larger root mean square is scaled down to it, before the
            update enters the mean.
        betas: three numbers below 1: decay of the mean of updates (above 0), of the mean of squared
            gradients, and of the mean of squared differences.
        weight_decay: decoupled weight decay, applied before the update.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a parameter or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler and ``grad_norm`` work as documented for ``AdamW``. ``state[p]``
    holds ``step``, ``exp_avg`` and the scale of ``exp_avg``, and in fp32 ``exp_avg_sq_row, exp_avg_sq_col,
    exp_avg_sq, exp_avg_res_row, exp_avg_res_col``. Tensors that the parameter does not need are empty.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = shoestring.optim.CAME(model.parameters(), lr=2e-4)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg_sq_row"].shape
        torch.Size([32, 1])
    """

    _core_class = "CAME"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults = dict(lr=lr, eps=eps, clip_threshold=clip_threshold, betas=betas, weight_decay=weight_decay)
        super().__init__(params, defaults, **options)

"""Adafactor, optionally with a running mean of updates that is stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.whole import WholeTensorOptimizer


class Adafactor(WholeTensorOptimizer):
    """Adafactor (arXiv 1804.04235): keeps only row and column means of the second moment of a matrix.

    The rule is that of ``torch.optim.Adafactor``:

    - The second moment is the product of its means over rows and over columns (of the last two dimensions). Its
      beta2 is ``1 - t^beta2_decay``, where t counts the steps of the parameter p.
    - The update ``u = g / sqrt(second moment)`` of the gradient g is scaled down if its root mean square exceeds d.
    - ``p = p (1 - lr weight_decay) - max(eps[1], rms(p)) min(lr, 1 / sqrt(t)) u``.

    With ``beta1`` above 0, a running mean of the scaled-down updates replaces u. This mean is kept in 8 bits. A
    NaN or infinite element of a gradient spoils the whole parameter.

    Memory: 4 bytes per row, per column and per parameter, so ``4 (rows + columns + 1)`` for a matrix. A
    vector of n elements takes ``4 (n + 1)``. A parameter with more than two dimensions is a batch of
    matrices. A mean of updates adds 1.02 bytes per element. A step takes 4 bytes of temporary memory per
    element of one parameter at a time. It takes 8 bytes if the gradient is not fp32 or is scaled, or with
    ``weight_rounding="remainder"``.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: the maximum relative step size: a number, or a tensor of one element as for ``AdamW``.
        beta2_decay: beta2 is ``1 - step ** beta2_decay``; at most 0.
        eps: two numbers. The first is the lower bound of the root of the second moment (None: the machine
            epsilon of the dtype). The step is multiplied by the root mean square of the weights; the second
            number is the lower bound of this factor.
        d: updates with a root mean square above d are scaled down to it; at least 1.
        weight_decay: decoupled weight decay, applied before the update.
        beta1: the weight of the old mean of updates in the new mean, in [0, 1). 0 means that there is no mean.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a parameter or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler and ``grad_norm`` work as documented for ``AdamW``. ``state[p]``
    holds ``step, row_var, col_var, variance`` in fp32; tensors that the parameter does not need are empty. If
    beta1 is above 0, it also holds ``exp_avg`` and the scale of ``exp_avg``.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.Adafactor(model.parameters(), lr=1e-2)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        516
    """

    _core_class = "Adafactor"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, beta1=beta1)
        super().__init__(params, defaults, **options)

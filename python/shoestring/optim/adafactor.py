"""Adafactor, optionally with a running mean of updates that is stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments
from shoestring.optim.whole import WholeTensorOptimizer, factored


def adafactor_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    *,
    row_var: Sequence[Tensor],
    col_var: Sequence[Tensor],
    variance: Sequence[Tensor],
    lr: float,
    beta1: float = 0.0,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    d: float = 1.0,
    weight_decay: float = 0.0,
    **arguments: Unpack[StepArguments],
) -> None:
    """Take one Adafactor step in place on every parameter that has a gradient, one after another.

    The rule is that of ``torch.optim.Adafactor``:

    - The second moment is the product of its means over rows and over columns (of the last two dimensions).
      Its beta2 is ``1 - t^beta2_decay``.
    - The update ``u = g / sqrt(second moment)`` is scaled down if its root mean square exceeds d. g is the
      gradient.
    - ``p = p (1 - lr weight_decay) - max(eps2, rms(p)) min(lr, 1 / sqrt(t)) u``. p is the parameter, and t
      counts its steps.

    See "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235). With beta1 above
    0, the running mean of the scaled-down updates replaces u. Temporary memory is 4 bytes per element of one
    parameter at a time. It is 8 bytes if the gradient is not fp32 or is scaled, or with a weight remainder. A
    NaN or infinite element of a gradient spoils the whole parameter.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg: the mean of the updates of all parameters in one flat tensor, the arena; None if beta1 is 0.
            Each parameter starts at a multiple of 256 elements. fp32 or bf16 values, (elements of the arena);
            or uint8 codes, one 8-bit or two 4-bit codes per byte.
        exp_avg_scale: fp32 scales of the codes, or None without codes. The shape is (elements of the arena /
            256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit codes.
        row_var, col_var: one fp32 tensor per parameter: the mean of squared gradients over each row, and over
            each column. For a parameter of shape (..., rows, columns) the shapes are (..., rows, 1) and (...,
            1, columns). For a parameter with fewer than two dimensions both are empty, (0).
        variance: one fp32 tensor per parameter: the mean of squared gradients in the parameter's shape if the
            parameter has fewer than two dimensions, else empty, (0).
        lr: the maximum relative step size.
        beta1: the weight of the old mean in the new mean, in [0, 1). 0 means that there is no mean.
        beta2_decay, eps2, d, weight_decay: as in ``torch.optim.Adafactor``.
        eps1: as in ``torch.optim.Adafactor``. None means the machine epsilon of the parameter's dtype (of
            fp32, with a weight remainder).
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    Example:
        >>> param, grad, step = torch.ones(4, 8), torch.ones(4, 8), torch.zeros(1)
        >>> means = dict(row_var=[torch.zeros(4, 1)], col_var=[torch.zeros(1, 8)], variance=[torch.zeros(0)])
        >>> shoestring.ops.adafactor_([param], [grad], step, **means, lr=0.1)
        >>> torch.allclose(param, torch.tensor(0.9))
        True
    """
    torch.ops.shoestring.adafactor_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        row_var,
        col_var,
        variance,
        lr=lr,
        beta1=beta1,
        beta2_decay=beta2_decay,
        eps1=eps1,
        eps2=eps2,
        d=d,
        weight_decay=weight_decay,
        **arguments,
    )


MEAN = (Moment("exp_avg", signed=True),)


class Adafactor(WholeTensorOptimizer):
    """Adafactor (arXiv 1804.04235): keeps only row and column means of the second moment of a matrix.

    The rule is that of ``torch.optim.Adafactor``. With ``beta1`` above 0, a running mean of the clipped
    updates replaces the updates. This mean is kept in 8 bits.

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
        beta1: the weight of the old mean of updates in the new mean, in [0, 1). It must be above 0 in all
            groups, or 0 in all groups.
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
    _splits = False

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
        self._moments = MEAN if beta1 else ()
        own = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, beta1=beta1)
        super().__init__(params, own, **options)

    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        beta1 = group["beta1"]
        same = (beta1 > 0) == bool(self._moments)
        self._expect(same, "beta1", "a number above 0 in all groups or in none", beta1)

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return dict(zip(("row_var", "col_var", "variance"), factored(tuple(param.shape)), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._moments = state.get("_moments", self.__dict__.get("_moments", ()))
        super().__setstate__(state)

"""CAME, whose running mean of updates is stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments
from shoestring.optim.whole import WholeTensorOptimizer, factored


def came_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None = None,
    *,
    exp_avg_sq_row: Sequence[Tensor],
    exp_avg_sq_col: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    exp_avg_res_row: Sequence[Tensor],
    exp_avg_res_col: Sequence[Tensor],
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    beta3: float = 0.9999,
    eps1: float = 1e-30,
    eps2: float = 1e-16,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    **arguments: Unpack[StepArguments],
) -> None:
    """Take one CAME step in place on every parameter p that has a gradient g, one parameter after another.

    - v, the running mean of ``g^2 + eps1``, is factored: the product of its means over rows and over columns
      (of the last two dimensions), divided by the mean of the row means.
    - The update is ``u = g / sqrt(v)``, divided by ``max(1, rms(u) / clip_threshold)``. m is the running mean
      of u.
    - s, the instability, is the running mean of ``(u - m)^2 + eps2`` and is factored like v.
    - ``p = p (1 - lr weight_decay) - lr m / sqrt(s)``.

    For parameters with fewer than two dimensions, v is stored in full, and m replaces ``m / sqrt(s)``. No
    running mean has a bias correction. See "CAME: Confidence-guided Adaptive Memory Efficient Optimization"
    (arXiv 2307.02047) and its authors' implementation. Temporary memory: 8 bytes per element of one parameter
    at a time. A NaN or infinite element of a gradient spoils the whole parameter.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg: m of all parameters in one flat tensor, the arena. Each parameter starts at a multiple of 256
            elements. fp32 or bf16 values, (elements of the arena); or uint8 codes, one 8-bit or two 4-bit
            codes per byte.
        exp_avg_scale: fp32 scales of the codes, or None without codes. The shape is (elements of the arena /
            256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit codes.
        exp_avg_sq_row, exp_avg_sq_col: the factors of v, one fp32 tensor per parameter. For a parameter of
            shape (..., rows, columns) the shapes are (..., rows, 1) and (..., 1, columns). For a parameter
            with fewer than two dimensions both are empty, (0).
        exp_avg_sq: v in full, one fp32 tensor per parameter: of the parameter's shape if the parameter has
            fewer than two dimensions, else empty, (0).
        exp_avg_res_row, exp_avg_res_col: the factors of s, with the shapes of the factors of v.
        lr: learning rate.
        beta1, beta2, beta3: decay of m, v and s, below 1. beta1 is above 0.
        eps1, eps2, clip_threshold: above 0.
        weight_decay: decoupled weight decay, applied before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    Example:
        >>> param, grad, step, mean = torch.ones(4, 8), torch.ones(4, 8), torch.zeros(1), torch.zeros(256)
        >>> names = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "exp_avg_res_row", "exp_avg_res_col")
        >>> shapes = ((4, 1), (1, 8), 0, (4, 1), (1, 8))
        >>> factors = {name: [torch.zeros(shape)] for name, shape in zip(names, shapes)}
        >>> shoestring.ops.came_([param], [grad], step, mean, **factors, lr=0.01)
        >>> step, bool((param < 1).all())
        (tensor([1.]), True)
    """
    torch.ops.shoestring.came_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq_row,
        exp_avg_sq_col,
        exp_avg_sq,
        exp_avg_res_row,
        exp_avg_res_col,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        beta3=beta3,
        eps1=eps1,
        eps2=eps2,
        clip_threshold=clip_threshold,
        weight_decay=weight_decay,
        **arguments,
    )


class CAME(WholeTensorOptimizer):
    """CAME (arXiv 2307.02047): Adafactor with smaller steps where updates differ from their mean.

    The rule is that of the authors' implementation. The running means have no bias correction. For parameters
    with fewer than two dimensions, the update is not divided by the instability (the mean squared difference
    between updates and their mean).

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

    _moments = (Moment("exp_avg", signed=True),)
    _core_class = "CAME"
    _expected: ClassVar[dict[str, str]] = {"betas": "three numbers in [0, 1), the first above 0"}
    _splits = False

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
        own = dict(lr=lr, eps=eps, clip_threshold=clip_threshold, betas=betas, weight_decay=weight_decay)
        super().__init__(params, own, **options)

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        row, col, full = factored(tuple(param.shape))
        own = dict(exp_avg_sq_row=row, exp_avg_sq_col=col, exp_avg_sq=full)
        return own | dict(exp_avg_res_row=row, exp_avg_res_col=col)

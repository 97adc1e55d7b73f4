"""Schedule-Free AdamW whose second moment is stored quantised."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from typing_extensions import Unpack

from shoestring.core.one_thread import one_thread
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.interrupts import Uninterrupted


class ScheduleFreeAdamW(LowMemoryOptimizer):
    """Schedule-Free AdamW (arXiv 2405.15682) whose state takes 3.02 bytes per parameter instead of 8.

    It needs no learning rate schedule. Gradients are computed at one point, y. The weights for evaluation, x,
    are an average over all steps so far, so the number of steps need not be known. The parameters hold y
    during training. ``eval()`` turns the parameters into x, and ``train()`` turns them back into y. Call both
    methods where you call those of the model::

        optimizer.train(); model.train()    # the initial mode of the optimizer
        ...
        optimizer.eval(); model.eval()      # before evaluation, and before saving weights for use

    A second ``eval()`` or ``train()`` in a row changes nothing. Switching to the other mode and back
    reproduces the weights to within a unit in the last place of the larger of x and y. Save the model and the
    optimizer in the same mode, whichever it is: the mode in a loaded state dict must match the loaded
    weights. Batch norm collects its running statistics with the weights y. To get the statistics for x, run a
    few batches through the model in training mode before evaluation.

    The paper's third sequence of weights, z, takes the steps. It is stored as the ``offset``, z - y. Let g be the
    gradient in step t, and v the running mean of squared gradients. Let ``u = g / (sqrt(v / (1 - beta2^t)) + eps)
    + weight_decay y``. With c, the weight of this step in the average x, the step is

        y <- y + c offset + lr (beta1 (1 - c) - 1) u,    offset <- (1 - c) (offset - lr beta1 u).

    This equals ``z <- z - lr u``, ``x <- (1 - c) x + c z``, ``y = beta1 x + (1 - beta1) z``, so ``x = y - offset
    (1 - beta1) / beta1``. In step t up to ``warmup_steps`` = W, the learning rate is t / W times lr, and ``c = 6 t
    / ((t + 1) (2 t + 1))``. After the warm-up every step has the weight of the last step of the warm-up. Without a
    warm-up, c is 1 / t. The offset moves less per step than one quantisation level. If the second moment is
    quantised, the offset is therefore bf16 with stochastic rounding, which is exact on average.

    Memory: ``sum(ceil(n / 256) * 772 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 772 bytes per block of 256 elements become 648 with 4-bit
    state, 1024 with bf16 and 2048 with fp32. ``weight_rounding="remainder"`` adds 512.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``. Usually 1 to 10 times
            AdamW's. You may change lr during training, but the average x ignores the change. A step's weight
            in the average is the square of its warm-up factor, which depends only on the number of steps of
            the parameter.
        betas: two numbers: the weight of x in y, above 0 and below 1, and the decay of the running mean of
            the squared gradient, in [0, 1). Do not change the first number between ``eval()`` and
            ``train()``.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay: ``weight_decay * y`` is added to the update.
        warmup_steps: the number of steps in which the learning rate rises linearly to ``lr``. 0 means no
            warm-up.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.
        RuntimeError: a step is taken in eval mode.

    Parameter groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` work as documented for ``AdamW``.
    ``state[p]`` holds ``step, offset, exp_avg_sq, exp_avg_sq_scale`` (no scale with fp32 or bf16 state). Each
    group holds the mode as ``train_mode``.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = shoestring.optim.ScheduleFreeAdamW(model.parameters(), lr=2.5e-3, warmup_steps=10)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> optimizer.param_groups[0]["train_mode"]
        False
    """

    _core_class = "ScheduleFreeAdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup_steps=warmup_steps, train_mode=True
        )
        super().__init__(params, defaults, **options)

    def train(self) -> None:
        """Set the parameters to y, the weights at which gradients are computed."""
        self._switch(train_mode=True)

    def eval(self) -> None:
        """Set the parameters to x, the average for evaluation."""
        self._switch(train_mode=False)

    @_disable_dynamo
    @torch.no_grad()
    @one_thread
    def _switch(self, *, train_mode: bool) -> None:
        with Uninterrupted():
            self._synchronize()
            self._core.set_train_mode(train_mode)
            for group in self.param_groups:
                group["train_mode"] = train_mode

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Return the result of ``closure``, or None without a closure.
        """
        self._expect_train()
        return super().step(closure)

    def _on_gradient(self, param: Tensor) -> None:
        if self.step_in_backward:
            self._expect_train()
        super()._on_gradient(param)

    def _expect_train(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{self._name}: step: expected train mode, received eval mode; call train() before forward and backward"
            )

"""Lion with state in few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step


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
    """One step of Lion, in place, on every parameter that has a gradient, in one pass over all of them.

    A weight moves by lr, up or down: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, and then
    ``m = beta2 m + (1 - beta2) g`` ("Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675). The state of
    all parameters lies in flat arenas as for ``adamw_``. A NaN gradient spoils its weight. An infinite one moves it by
    lr, but spoils its moment; with 8-bit state both spoil the moments of a block of 256, but of no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr: what a weight moves by.
        beta1, beta2: the share of the moment in the update and in the new moment, [0, 1).
        weight_decay: times lr, the share of a weight that is taken away before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
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


def lion_reference(
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
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``lion_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        p = p * (1 - lr * weight_decay) - lr * (m * beta1 + g * (1 - beta1)).sign()
        return p, m * beta2 + g * (1 - beta2)

    reference_step(
        rule, params, grads, step, [ReferenceArena(exp_avg, exp_avg_scale, True, beta2)], lr=lr, **arguments
    )


class Lion(LowMemoryOptimizer):
    """Lion (arXiv 2302.06675) whose moment is kept in 8 bits: 1.02 bytes a parameter instead of 4.

    A weight moves by lr, up or down: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``; then
    ``m = beta2 m + (1 - beta2) g``. Learning rates are 3 to 10 times below AdamW's, weight decay as much above.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 260, 160 for 4-bit state, 512 for bf16 and 1024 for fp32, and 512 more with ``weights="remainder"``.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: the share of the moment in the update, and in the new moment, each in [0, 1).
        weight_decay: decoupled, applied before the update.
        **options: as for ``AdamW``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``step, exp_avg, exp_avg_scale``, and ``load_state_dict`` reads bitsandbytes' ``Lion8bit``.
    """

    _moments = (Moment("exp_avg", signed=True),)
    _operator = staticmethod(lion_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return dict(beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas, decay = group["betas"], group["weight_decay"]
        self._expect(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)", betas
        )
        self._expect(decay >= 0, "weight_decay", "a number of at least 0", decay)

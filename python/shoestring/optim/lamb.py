"""LAMB with state in few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step
from shoestring.optim.whole import WholeTensorOptimizer


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of LAMB, in place, on every parameter that has a gradient, one after another.

    AdamW's update u, and with it the decay, made as long as the weights: ``r = u + weight_decay p``; ``p = p - lr |p| /
    |r| r``, where either norm is 0 with 1 for their ratio (algorithm 2 of "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes", arXiv 1904.00962, phi being the identity). Temporary memory: at most 12 bytes an
    element of one parameter at a time (4 without weight decay). A NaN or infinite gradient spoils its whole parameter.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale, exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit``
            has it.
        lr: what a parameter moves by, as a share of its norm.
        beta1, beta2, eps, weight_decay: as for ``adamw_``; the decay is a part of what the norm is taken of.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.lamb_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        **arguments,
    )


def lamb_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``lamb_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, t: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = m * beta1 + g * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + weight_decay * p
        norm, length = p.norm(), r.norm()
        trust = norm / length if norm > 0 and length > 0 else 1.0
        return p - lr * trust * r, m, v

    arenas = [
        ReferenceArena(exp_avg, exp_avg_scale, True, beta1),
        ReferenceArena(exp_avg_sq, exp_avg_sq_scale, False, beta2),
    ]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class LAMB(WholeTensorOptimizer):
    """LAMB (arXiv 1904.00962), for large batches, with moments in 8 bits: 2.03 bytes a parameter instead of 8.

    AdamW's update, and with it the decay, is made as long as the weights, parameter by parameter: lr is a share of
    their norm.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 520, 296 for 4-bit state, 1024 for bf16 and 2048 for fp32, and 512 more with ``weights="remainder"``.
    During a step, at most 12 bytes an element of one parameter at a time.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: the weights' share in what is made as long as they are.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, parameter or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler and ``grad_norm`` holds here as well.
    """

    _moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
    _operator = staticmethod(lamb_)
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return dict(beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"])

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        self._expect(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)", betas
        )
        for name in ("eps", "weight_decay"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])

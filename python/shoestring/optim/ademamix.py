"""AdEMAMix with state in few bits."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step


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
    """One step of AdEMAMix, in place, on every parameter that has a gradient, in one pass over all of them.

    AdamW with a second, slow mean of gradients: ``p = p (1 - lr weight_decay) - lr (m / (1 - beta1^t) + alpha s) /
    (sqrt(v / (1 - beta2^t)) + eps)``, where m, s and v are the means of gradients, of gradients, and of their squares,
    with beta1, beta3 and beta2 ("The AdEMAMix Optimizer", arXiv 2409.03137). The state of all parameters lies in flat
    arenas as for ``adamw_``. A NaN or infinite gradient spoils its weight, and with codes its block of 256, but no
    other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale, exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit``
            has it.
        exp_avg_slow: (elements of the arena): fp32 where the others are, else bf16, rounded stochastically: codes are
            further apart than it moves in a step.
        lr, beta1, beta2, eps, weight_decay: as for ``adamw_``.
        beta3: the share of the slow mean in the new slow mean, [0, 1).
        alpha: of the slow mean in the update, at least 0.
        t_alpha: steps in which alpha rises from 0, evenly; None: it is there at once.
        t_beta3: steps in which the slow mean's share rises from beta1 to beta3, so that the time after which half is
            forgotten grows evenly; None: it is beta3 at once.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
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


def ademamix_reference(
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
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``ademamix_`` in plain PyTorch, a tensor at a time."""

    def slow_beta(t: float) -> float:
        if t_beta3 is None or t >= t_beta3:
            return beta3
        log1, log3, share = math.log(beta1), math.log(beta3), t / t_beta3
        return math.exp(log1 * log3 / ((1 - share) * log3 + share * log1))

    def rule(
        lr: float, t: int, p: Tensor, g: Tensor, m: Tensor, slow: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        a = alpha if t_alpha is None else alpha * min(t / t_alpha, 1)
        b = slow_beta(t)
        m = m * beta1 + g * (1 - beta1)
        slow = slow * b + g * (1 - b)
        v = v * beta2 + g * g * (1 - beta2)
        update = (m / (1 - beta1**t) + a * slow) / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)
        return p * (1 - lr * weight_decay) - lr * update, m, slow, v

    arenas = [
        ReferenceArena(exp_avg, exp_avg_scale, True, beta1),
        ReferenceArena(exp_avg_slow, None, True, slow_beta(step.amax().item() + 1)),
        ReferenceArena(exp_avg_sq, exp_avg_sq_scale, False, beta2),
    ]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class AdEMAMix(LowMemoryOptimizer):
    """AdEMAMix (arXiv 2409.03137) with moments in 8 bits, the slow one in 16: 4.03 bytes a parameter instead of 12.

    AdamW with a second, slow mean of gradients, ``alpha`` times which is added to the first in the update.

    Memory: ``sum(ceil(n / 256) * 1032 + 4)`` bytes over the parameters that have had a gradient, n being their sizes;
    in place of 1032, 808 for 4-bit state, 1536 for bf16 and 3072 for fp32, and 512 more with ``weights="remainder"``. The
    slow mean moves by less in a step than codes are apart; where other moments are codes, it is bf16 and rounded
    stochastically, which is right in the mean.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: decay of the running means of the gradient, of its square, and of the gradient again, slowly; each in
            [0, 1).
        alpha: of the slow mean in the update.
        t_alpha: steps in which alpha rises from 0, evenly; None: it is there at once.
        t_beta3: steps in which the slow mean's decay rises from the first to the third beta, so that the time after
            which half is forgotten grows evenly; None: it is there at once.
        eps: added to the root of the second moment.
        weight_decay: decoupled, applied before the update.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``exp_avg_slow``, which never has a scale, beside the entries of ``AdamW``.
    """

    _moments = (
        Moment("exp_avg", signed=True),
        Moment("exp_avg_slow", signed=True, long=True),
        Moment("exp_avg_sq", signed=False),
    )
    _operator = staticmethod(ademamix_)

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

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("alpha", "t_alpha", "t_beta3", "eps", "weight_decay")
        return dict(zip(("beta1", "beta2", "beta3"), group["betas"], strict=True)) | {
            n: group[n] for n in names
        }

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        self._expect(
            len(betas) == 3 and all(0 <= b < 1 for b in betas), "betas", "three numbers in [0, 1)", betas
        )
        for name in ("alpha", "eps", "weight_decay"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])
        for name in ("t_alpha", "t_beta3"):
            steps = group[name]
            good = steps is None or (isinstance(steps, int) and steps > 0)
            self._expect(good, name, "None or a number of steps", steps)
        rises = group["t_beta3"] is None or 0 < betas[0] <= betas[2]
        self._expect(rises, "betas", "a third of at least the first, and that above 0, with t_beta3", betas)

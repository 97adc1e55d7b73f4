"""AdamW with state in few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.convert import exported
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step


def adamw_(
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
    """One step of AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    The state of all parameters lies in flat arenas, in the order of ``params``, each beginning at a multiple of 256
    elements. ``shoestring.optim.AdamW`` manages them. The update uses the new moments before they are quantised. A NaN
    or infinite gradient spoils its weight as in PyTorch, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        exp_avg, exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_scale, exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``; decay comes before the update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.

    With other than fp32 state on a GPU an update takes its root and its reciprocal from hardware instructions, which are
    wrong by a unit or two in the last place, and eps is at least 1.1e-19.
    """
    torch.ops.shoestring.adamw_(
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


def adamw_reference(
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
    """``adamw_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = m + (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        p = p * (1 - lr * weight_decay)
        return p - lr / bias1 * (m / (v.sqrt() / bias2**0.5 + eps)), m, v

    arenas = [
        ReferenceArena(exp_avg, exp_avg_scale, True, beta1),
        ReferenceArena(exp_avg_sq, exp_avg_sq_scale, False, beta2),
    ]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class AdamW(LowMemoryOptimizer):
    """AdamW (arXiv 1711.05101) whose moments are kept in 8 bits: 2.03 bytes a parameter instead of 8.

    A drop-in for ``torch.optim.AdamW``: parameter groups, schedulers, hooks, closures and state dicts work as there.
    State of any size is quantised, in blocks of 256 elements with an fp32 scale each (arXiv 2110.02861); the
    bytes are those of bitsandbytes, but that a second moment is zero only where it is exactly zero. A step computes in
    fp32 with the moments as they are before quantisation, all tensors of a group in one pass; results do not depend on
    the number of threads.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 520, 296 for 4-bit state, 1024 for bf16 and 2048 for fp32, and 512 more with ``weights="remainder"``. State
    is made when a parameter first has a gradient.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element. One on the parameters' device is read there by each
            step: a schedule may change it in place (``fill_``) between the replays of a CUDA graph.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled, applied before the update.
        **options: see ``LowMemoryOptions``: ``state``, ``weights``, ``max_grad_norm``, ``step_in_backward`` and others.

    Attributes:
        grad_norm: with ``max_grad_norm``, the last step's norm before clipping (without the scale of a GradScaler): an
            fp32 scalar on the gradients' device, not waited for. ``max_grad_norm=torch.inf`` measures, and never clips.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.
        TypeError: an option of ``torch.optim.AdamW`` that is not supported (amsgrad, foreach, fused, capturable, ...).

    Under ``torch.amp.GradScaler`` the step itself divides the gradients by the scale, and skips without the host having
    to wait where they were not finite. On a GPU a step waits for nothing, and can be captured in a CUDA graph; the
    state has to exist before (one step, outside).

    ``state[p]`` holds ``step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale`` (without the scales for fp32):
    views into memory that the group shares. Change their values in place, or replace them through ``load_state_dict``
    (which also reads the state dicts of ``torch.optim.AdamW``, bitsandbytes' ``AdamW8bit`` and their like); an entry
    that is assigned is not seen.
    """

    _moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
    _operator = staticmethod(adamw_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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

    def torch_state_dict(self) -> dict[str, Any]:
        """A copy of the state for ``torch.optim.AdamW.load_state_dict``: fp32 moments, in the parameters' shapes.

        PyTorch casts them to the parameters' dtype when it loads them.
        """
        return exported(self, self._moments)

"""SGD with momentum, its buffer in few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.convert import exported
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of SGD with momentum, in place, on every parameter that has a gradient, in one pass over all of them.

    What ``torch.optim.SGD`` does: ``g = g + weight_decay p``; the buffer becomes g in a parameter's first step (from
    ``step`` 0), and ``momentum buffer + (1 - dampening) g`` in later ones; then ``p = p - lr buffer``, or with
    Nesterov's momentum ``p = p - lr (g + momentum buffer)``. The state of all parameters lies in flat arenas as
    for ``adamw_``. A NaN or infinite gradient spoils its weight, and with 8-bit state its block of 256, but no other.

    Args:
        params: fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        momentum_buffer: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        momentum_buffer_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, momentum, dampening, weight_decay, nesterov: as in ``torch.optim.SGD``. momentum is above 0: without it
            there is no state to keep. nesterov needs dampening 0.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.sgd_(
        params,
        grads,
        step,
        momentum_buffer,
        momentum_buffer_scale,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        **arguments,
    )


def sgd_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``sgd_`` in plain PyTorch, a tensor at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        g = g + weight_decay * p
        buffer = g if step == 1 else buffer * momentum + g * (1 - dampening)
        return p - lr * (g + momentum * buffer if nesterov else buffer), buffer

    arenas = [ReferenceArena(momentum_buffer, momentum_buffer_scale, True, momentum)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class SGD(LowMemoryOptimizer):
    """SGD with momentum, whose buffer is kept in 8 bits: 1.02 bytes a parameter instead of 4.

    What ``torch.optim.SGD`` computes. There is none without momentum, which has no state to keep: that is torch's.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 260, 160 for 4-bit state, 512 for bf16 and 1024 for fp32, and 512 more with ``weights="remainder"``.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        momentum: the share of the buffer that stays, above 0.
        dampening: the share of the gradient that does not enter the buffer, but for the first.
        weight_decay: an L2 penalty, added to the gradient (after clipping).
        nesterov: step along the gradient and the momentum ahead; wants ``dampening=0``.
        **options: as for ``AdamW``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``step, momentum_buffer, momentum_buffer_scale``, and ``load_state_dict`` reads
    ``torch.optim.SGD``'s.
    """

    _moments = (Moment("momentum_buffer", signed=True),)
    _operator = staticmethod(sgd_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, defaults, **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")}

    def _check_rule(self, group: dict[str, Any]) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        self._expect(
            momentum > 0, "momentum", "a number above 0 (without momentum use torch.optim.SGD)", momentum
        )
        self._expect(decay >= 0, "weight_decay", "a number of at least 0", decay)
        fits = not group["nesterov"] or group["dampening"] == 0
        self._expect(fits, "dampening", "0 with nesterov", group["dampening"])

    def torch_state_dict(self) -> dict[str, Any]:
        """A copy of the state for ``torch.optim.SGD.load_state_dict``: fp32 buffers, in the parameters' shapes.

        PyTorch casts them to the parameters' dtype when it loads them.
        """
        return exported(self, self._moments)

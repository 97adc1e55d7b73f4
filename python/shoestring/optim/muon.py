"""Muon with momentum in few bits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.convert import exported
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step
from shoestring.optim.whole import WholeTensorOptimizer

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str = "original",
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of Muon, in place, on every matrix that has a gradient, one after another.

    What ``torch.optim.Muon`` does: ``m = momentum m + (1 - momentum) g``; Newton-Schulz steps bring the singular values
    of m, or with Nesterov's momentum of ``momentum m + (1 - momentum) g``, near 1; the matrix O that they make moves
    the weight: ``p = p (1 - lr weight_decay) - lr scale O`` (Jordan, "Muon: an optimizer for hidden layers in neural
    networks", 2024). The products are bf16, added in fp32, on CUDA and on CPUs that have units for it, and elsewhere
    fp32. Temporary memory: at most 16 bytes an element (8 where products are bf16) of one parameter at a time. A NaN or
    infinite gradient spoils its whole matrix.

    Args:
        params: matrices: fp32, bf16 or fp16, of any sizes.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        momentum_buffer: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        momentum_buffer_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, momentum, weight_decay, nesterov: as in ``torch.optim.Muon``; momentum in [0, 1).
        ns_coefficients: a, b, c of ``a X + b (X X^T) X + c (X X^T)^2 X``.
        eps: the least norm that m is divided by.
        ns_steps: Newton-Schulz steps, 1 to 99.
        adjust_lr_fn: scale: "original", sqrt(max(1, rows / columns)), or "match_rms_adamw", 0.2 sqrt(max(rows,
            columns)), with which lr and weight_decay of AdamW fit.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.muon_(
        params,
        grads,
        step,
        momentum_buffer,
        momentum_buffer_scale,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        eps=eps,
        ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr_fn,
        **arguments,
    )


def orthogonalize(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz steps towards U V^T of a matrix x = U S V^T, in fp64."""
    a, b, c = coefficients
    x = x.double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str = "original",
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``muon_`` in plain PyTorch, a tensor at a time; the products are fp64."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = m * momentum + g * (1 - momentum)
        ahead = m * momentum + g * (1 - momentum) if nesterov else m
        rows, columns = p.shape
        scale = (
            max(1, rows / max(columns, 1)) ** 0.5
            if adjust_lr_fn == "original"
            else 0.2 * max(rows, columns) ** 0.5
        )
        update = scale * orthogonalize(ahead, ns_coefficients, ns_steps, eps)
        return p * (1 - lr * weight_decay) - lr * update.float(), m

    arenas = [ReferenceArena(momentum_buffer, momentum_buffer_scale, True, momentum)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class Muon(WholeTensorOptimizer):
    """Muon (Jordan, 2024) whose momentum is kept in 8 bits: 1.02 bytes a parameter instead of 4.

    What ``torch.optim.Muon`` does: ``m = momentum m + (1 - momentum) g``; Newton-Schulz steps bring the singular values
    of m, or with Nesterov's momentum of ``momentum m + (1 - momentum) g``, near 1, and what they make moves the weight.
    For the matrices of hidden layers; embeddings, heads, biases and norms want ``shoestring.optim.AdamW``. Products are
    bf16 on CUDA and on CPUs with units for it, else fp32.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 260, 160 for 4-bit state, 512 for bf16 and 1024 for fp32, and 512 more with ``weights="remainder"``. During
    a step, at most 16 bytes an element of one parameter at a time (8 where products are bf16).

    Args:
        params: matrices, as parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        weight_decay: decoupled, applied before the update.
        momentum: the share of the mean of gradients in the new mean, [0, 1).
        nesterov: Nesterov's momentum.
        ns_coefficients: of the Newton-Schulz polynomial.
        eps: the least norm that m is divided by.
        ns_steps: Newton-Schulz steps, 1 to 99.
        adjust_lr_fn: what lr is multiplied by: "original" or None, sqrt(max(1, rows / columns)), or "match_rms_adamw",
            0.2 sqrt(max(rows, columns)), with which lr and weight_decay of AdamW fit.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, parameter or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler and ``grad_norm`` holds here as well; ``state[p]`` holds
    ``step, momentum_buffer, momentum_buffer_scale``, and ``load_state_dict`` reads those of ``torch.optim.Muon``.
    """

    _moments = (Moment("momentum_buffer", signed=True),)
    _operator = staticmethod(muon_)
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        own: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        own |= dict(ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        super().__init__(params, own, **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")
        return {name: group[name] for name in names} | {"adjust_lr_fn": group["adjust_lr_fn"] or "original"}

    def _check_rule(self, group: dict[str, Any]) -> None:
        for name in ("weight_decay", "eps"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])
        self._expect(0 <= group["momentum"] < 1, "momentum", "a number in [0, 1)", group["momentum"])
        coefficients, steps, adjust = group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]
        self._expect(len(coefficients) == 3, "ns_coefficients", "three numbers", coefficients)
        self._expect(
            isinstance(steps, int) and 0 < steps < 100, "ns_steps", "a whole number from 1 to 99", steps
        )
        known = adjust in (None, "original", "match_rms_adamw")
        self._expect(known, "adjust_lr_fn", 'None, "original" or "match_rms_adamw"', adjust)

    def _check_param(self, index: int, param: Tensor) -> None:
        super()._check_param(index, param)
        if param.dim() != 2:
            raise ValueError(
                f"{self._name}: params[{index}]: expected a matrix, received shape {tuple(param.shape)}; use "
                "shoestring.optim.AdamW for parameters of other shapes"
            )

    def torch_state_dict(self) -> dict[str, Any]:
        """A copy of the state for ``torch.optim.Muon.load_state_dict``: fp32 momentum, in the parameters' shapes."""
        return exported(self, self._moments)

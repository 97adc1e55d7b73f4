"""Muon over a flat arena of state."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.optimizer import Arena, ReferenceArguments, StepArguments, reference_step

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

    arenas = [Arena(momentum_buffer, momentum_buffer_scale, True, momentum)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)

"""One step of each optimizer operator in plain PyTorch, one parameter at a time.

Keyword arguments of a reference that it does not name are those of the operator (csrc/optim/schema.cpp). Only whole parameters are
stepped, so ``first_block`` and ``blocks`` are not accepted.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.optim.muon import COEFFICIENTS
from shoestring.quantization.quantize_8bit import STATE_BLOCK

from .core import philox
from .quantization import (
    dequantize_8bit_reference,
    dequantize_state_4bit_reference,
    quantize_8bit_reference,
    quantize_state_4bit_reference,
)

Tensors = Sequence[Tensor]
Gradients = Sequence[Tensor | None]


class ReferenceArena(NamedTuple):
    """One moment of all parameters in a flat tensor, as fp32 or bf16 values or as codes with scales.

    signed: whether the moment may be negative. keeps: beta, by which a step multiplies the old moment.
    """

    values: Tensor
    scale: Tensor | None
    signed: bool
    keeps: float

    @property
    def is_4bit(self) -> bool:
        """Whether the moment's codes have 4 bits, which follows from the number of code bytes per scale."""
        return self.scale is not None and self.scale.numel() * STATE_BLOCK != self.values.numel()

    def read(self, where: slice) -> Tensor:
        """Return the moment of one parameter, dequantised to fp32.

        ``where`` is the parameter's slice of the flat state tensor. It starts at a multiple of 256.
        """
        if self.scale is None:
            return self.values[where].float()
        if self.is_4bit:
            codes, scales = self._blocks_4bit(where, self.scale)
            return dequantize_state_4bit_reference(
                self.values[codes], self.scale[scales], signed=self.signed, numel=where.stop - where.start
            )
        return dequantize_8bit_reference(self.values[where], self.scale[_blocks(where)], signed=self.signed)

    def write(self, where: slice, moment: Tensor, step: int, random: Callable[[], Tensor]) -> None:
        """Store the moment of one parameter in ``where``, the parameter's slice of the flat state tensor.

        The moment is quantised if the state tensor has scales, and rounded stochastically if it is bf16.
        """
        if self.scale is None:
            is_bf16 = self.values.dtype == torch.bfloat16
            self.values[where] = round_stochastically(moment, random()) if is_bf16 else moment
        elif self.is_4bit:
            codes, scales = self._blocks_4bit(where, self.scale)
            dithered = step if not self.signed or self.keeps > 0.93 else None
            self.values[codes], self.scale[scales] = quantize_state_4bit_reference(
                moment, signed=self.signed, step=dithered
            )
        else:
            self.values[where], self.scale[_blocks(where)] = quantize_8bit_reference(
                moment, signed=self.signed
            )

    def _blocks_4bit(self, where: slice, scale: Tensor) -> tuple[slice, slice]:
        blocks, half = _blocks(where), STATE_BLOCK // 2
        scales = scale.numel() * half // self.values.numel()
        return slice(blocks.start * half, blocks.stop * half), slice(
            blocks.start * scales, blocks.stop * scales
        )


def _blocks(where: slice) -> slice:
    return slice(where.start // STATE_BLOCK, -(-where.stop // STATE_BLOCK))


def places(params: Tensors) -> list[slice]:
    """Return, for each parameter, the slice of the flat state tensors that holds its state."""
    found, begin = [], 0
    for param in params:
        found.append(slice(begin, begin + param.numel()))
        begin += -(-param.numel() // STATE_BLOCK) * STATE_BLOCK
    return found


def random_bits(seed: int, step: int, number: int, stream: int, count: int) -> Tensor:
    """Return 16 random bits (int64) for each of the ``count`` elements of a parameter.

    ``stream`` is 0 for the weight and 1 + k for moment k. The Philox counter consists of an index, the step,
    ``number`` and ``stream``.
    """
    index = torch.arange((count + 7) // 8)
    counter = [index, index >> 32, torch.full_like(index, step), torch.full_like(index, number << 3 | stream)]
    return philox(counter, seed)[:count]


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16. The magnitude is rounded up with a probability equal to the discarded fraction."""
    up = (x.view(torch.int32).long() + random) >> 16
    return torch.where(x.isnan(), x.bfloat16(), up.to(torch.int16).view(torch.bfloat16))


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Combine a bf16 weight and its int16 remainder to the fp32 weight that both together store."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split an fp32 weight into a bf16 weight and an int16 remainder. All NaNs become one NaN bit pattern."""
    bits = torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32).long())
    remainder = bits.to(torch.int16)
    return ((bits - remainder.long()) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def reference_step(
    rule: Callable[..., Tensors],
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    arenas: Sequence[ReferenceArena],
    *,
    lr: float,
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    clip_coef: Tensor | None = None,
    found_inf: Tensor | None = None,
    weight_remainder: Tensor | None = None,
    accumulated: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    extra: Sequence[Tensors] = (),
    numbers: Sequence[int] = (),
) -> None:
    """Run one optimizer step in plain PyTorch, one parameter at a time.

    ``rule(lr, step, p, g, moment, ...)`` receives a parameter p, its gradient g and its moments. It returns
    the new p and the new moments, all fp32 and in the parameter's shape. After the moments, ``rule`` receives
    the parameter's tensors from ``extra`` and changes them in place.
    """
    lr = lr if lr_tensor is None else lr_tensor.item()
    factor = (1.0 if clip_coef is None else clip_coef.item()) / (
        1.0 if grad_scale is None else grad_scale.item()
    )
    skips = found_inf is not None and found_inf.item() != 0
    for i, (param, grad, where) in enumerate(zip(params, grads, places(params), strict=True)):
        if grad is None:
            continue
        g = grad.float()
        if accumulated is not None:
            g = g + accumulated[where].float().view(g.shape)
            accumulated[where] = 0
        if skips:
            continue
        step[i] += 1
        t = int(step[i].item())

        def random(
            stream: int, number: int = numbers[i] if numbers else i, t: int = t, count: int = g.numel()
        ) -> Tensor:
            return random_bits(seed, t, number, stream, count)

        remainder = weight_remainder if param.dtype == torch.bfloat16 else None
        p = param.float() if remainder is None else join(param, remainder[where].view(param.shape))
        g = g * (-factor if maximize else factor)
        given = [a.read(where).view(p.shape) for a in arenas] + [e[i] for e in extra]
        p, *moments = (x.flatten() for x in rule(lr, t, p, g, *given))
        if remainder is not None:
            p, remainder[where] = split(p)
        elif stochastic_rounding and param.dtype == torch.bfloat16:
            p = round_stochastically(p, random(0))
        param.copy_(p.view(param.shape))
        for k, (arena, moment) in enumerate(zip(arenas, moments, strict=True)):
            arena.write(where, moment, t, functools.partial(random, 1 + k))


def apply_reference(
    params: Tensors, grads: Gradients, step: Tensor, *, lr: float, weight_decay: float, **arguments: Any
) -> None:
    """Compute the same weight update as ``_apply_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, update: Tensor) -> tuple[Tensor]:
        return (p * (1 - lr * weight_decay) - lr * update,)

    reference_step(rule, params, grads, step, [], lr=lr, **arguments)


def ema_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    beta: float,
    nesterov: bool = False,
    lr: float = 1.0,
    **arguments: Any,
) -> None:
    """Compute the same running means as ``_ema_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        m = m * beta + g * (1 - beta)
        return lr * (m * beta + g * (1 - beta) if nesterov else m), m

    reference_step(
        rule, params, grads, step, [ReferenceArena(exp_avg, exp_avg_scale, True, beta)], lr=lr, **arguments
    )


def sgd_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    momentum_buffer: Tensor,
    momentum_buffer_scale: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    **arguments: Any,
) -> None:
    """Compute the same step as ``sgd_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        g = g + weight_decay * p
        buffer = g if step == 1 else buffer * momentum + g * (1 - dampening)
        return p - lr * (g + momentum * buffer if nesterov else buffer), buffer

    arenas = [ReferenceArena(momentum_buffer, momentum_buffer_scale, True, momentum)]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


def lion_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    **arguments: Any,
) -> None:
    """Compute the same step as ``lion_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, step: int, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        p = p * (1 - lr * weight_decay) - lr * (m * beta1 + g * (1 - beta1)).sign()
        return p, m * beta2 + g * (1 - beta2)

    reference_step(
        rule, params, grads, step, [ReferenceArena(exp_avg, exp_avg_scale, True, beta2)], lr=lr, **arguments
    )


def adamw_reference(
    params: Tensors,
    grads: Gradients,
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
    **arguments: Any,
) -> None:
    """Compute the same step as ``adamw_`` in plain PyTorch, one parameter at a time."""

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


def ademamix_reference(
    params: Tensors,
    grads: Gradients,
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
    **arguments: Any,
) -> None:
    """Compute the same step as ``ademamix_`` in plain PyTorch, one parameter at a time."""

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


def schedule_free_adamw_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    offset: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    warmup_steps: int = 0,
    **arguments: Any,
) -> None:
    """Compute the same step as ``schedule_free_adamw_`` in plain PyTorch, one parameter at a time."""

    def share(t: int) -> float:
        weights = [min(i / max(warmup_steps, 1), 1) ** 2 for i in range(1, t + 1)]
        return weights[-1] / sum(weights)

    def rule(lr: float, t: int, y: Tensor, g: Tensor, offset: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        c, lr = share(t), lr * min(t / max(warmup_steps, 1), 1)
        v = v * beta2 + g * g * (1 - beta2)
        u = g / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps) + weight_decay * y
        return y + c * offset + lr * (beta1 * (1 - c) - 1) * u, (1 - c) * (offset - lr * beta1 * u), v

    arenas = [
        ReferenceArena(offset, None, True, beta1),
        ReferenceArena(exp_avg_sq, exp_avg_sq_scale, False, beta2),
    ]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


def lamb_reference(
    params: Tensors,
    grads: Gradients,
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
    **arguments: Any,
) -> None:
    """Compute the same step as ``lamb_`` in plain PyTorch, one parameter at a time."""

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


def orthogonalize(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Run Newton-Schulz steps in fp64. They bring a matrix with the SVD x = U S V^T towards U V^T."""
    a, b, c = coefficients
    x = x.double()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_reference(
    params: Tensors,
    grads: Gradients,
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
    **arguments: Any,
) -> None:
    """Compute the same step as ``muon_`` in plain PyTorch, one parameter at a time, with fp64 products."""

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


def advance_factored(
    g2: Tensor, row: Tensor, col: Tensor, full: Tensor, weight: float, least: float
) -> Tensor:
    """Update the row and column means of ``g2``, the squared gradient. Return the estimated second moment.

    ``weight`` is the weight of ``g2`` in the new means. The product of row and column means is divided by the
    mean of the row means, and ``least`` is the lower bound of that divisor.
    """
    if g2.dim() < 2:
        return full.lerp_(g2, weight)
    row.lerp_(g2.mean(-1, keepdim=True), weight)
    col.lerp_(g2.mean(-2, keepdim=True), weight)
    return row / row.mean(-2, keepdim=True).clamp(min=least) * col


def adafactor_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    exp_avg: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    *,
    row_var: Tensors,
    col_var: Tensors,
    variance: Tensors,
    lr: float,
    beta1: float = 0.0,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    d: float = 1.0,
    weight_decay: float = 0.0,
    **arguments: Any,
) -> None:
    """Compute the same step as ``adafactor_`` in plain PyTorch, one parameter at a time."""
    exact = arguments.get("weight_remainder") is not None
    eps = {
        p.dtype: torch.finfo(torch.float32 if exact else p.dtype).eps if eps1 is None else eps1
        for p in params
    }
    if len(eps) > 1:
        raise ValueError("adafactor_reference: params: expected one dtype, received several")
    least = next(iter(eps.values()), 0.0)

    def rule(lr: float, t: int, p: Tensor, g: Tensor, *state: Tensor) -> list[Tensor]:
        *m, row, col, full = state
        if p.numel() == 0:
            return [p, *m]
        root = p.numel() ** 0.5
        u = g / advance_factored(g * g, row, col, full, t**beta2_decay, least).clamp(min=least**2).sqrt()
        u = u / max(1, u.norm().item() / (root * d))
        if m:
            m = [m[0] * beta1 + u * (1 - beta1)]
            u = m[0]
        relative = min(lr, t**-0.5)
        return [p * (1 - lr * weight_decay) - max(eps2, p.norm().item() / root) * relative * u, *m]

    arenas = [] if exp_avg is None else [ReferenceArena(exp_avg, exp_avg_scale, True, beta1)]
    extra = [row_var, col_var, variance]
    reference_step(rule, params, grads, step, arenas, lr=lr, extra=extra, **arguments)


LEAST = torch.finfo(torch.float32).tiny


def came_reference(
    params: Tensors,
    grads: Gradients,
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None = None,
    *,
    exp_avg_sq_row: Tensors,
    exp_avg_sq_col: Tensors,
    exp_avg_sq: Tensors,
    exp_avg_res_row: Tensors,
    exp_avg_res_col: Tensors,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    beta3: float = 0.9999,
    eps1: float = 1e-30,
    eps2: float = 1e-16,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    **arguments: Any,
) -> None:
    """Compute the same step as ``came_`` in plain PyTorch, one parameter at a time."""

    def rule(lr: float, t: int, p: Tensor, g: Tensor, m: Tensor, *state: Tensor) -> list[Tensor]:
        row, col, full, res_row, res_col = state
        if p.numel() == 0:
            return [p, m]
        u = g / advance_factored(g * g + eps1, row, col, full, 1 - beta2, LEAST).clamp(min=LEAST).sqrt()
        u = u / max(1, u.norm().item() / (p.numel() ** 0.5 * clip_threshold))
        m = m * beta1 + u * (1 - beta1)
        update = m
        if p.dim() > 1:
            unstable = advance_factored((u - m) ** 2 + eps2, res_row, res_col, full, 1 - beta3, LEAST)
            update = m / unstable.clamp(min=LEAST).sqrt()
        return [p * (1 - lr * weight_decay) - lr * update, m]

    arenas = [ReferenceArena(exp_avg, exp_avg_scale, True, beta1)]
    extra = [exp_avg_sq_row, exp_avg_sq_col, exp_avg_sq, exp_avg_res_row, exp_avg_res_col]
    reference_step(rule, params, grads, step, arenas, lr=lr, extra=extra, **arguments)


def foreach_norm_reference(tensors: Tensors) -> Tensor:
    """Compute ``foreach_norm`` in plain PyTorch, in fp64 except for the result."""
    return torch.stack([t.double().square().sum() for t in tensors]).sqrt().float()

"""Arguments that all optimizer operators share, and the loop behind their references in plain PyTorch."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from shoestring.quantization.quantize_8bit import (
    STATE_BLOCK,
    dequantize_8bit_reference,
    quantize_8bit_reference,
)
from shoestring.quantization.quantize_state_4bit import (
    dequantize_state_4bit_reference,
    quantize_state_4bit_reference,
)


class ReferenceArguments(TypedDict, total=False):
    """Keyword arguments of every ``*_reference``: the part of ``StepArguments`` for whole parameters."""

    maximize: bool
    lr_tensor: Tensor | None
    grad_scale: Tensor | None
    clip_coef: Tensor | None
    found_inf: Tensor | None
    weight_remainder: Tensor | None
    accumulated: Tensor | None
    stochastic_rounding: bool
    seed: int
    numbers: Sequence[int]


class StepArguments(ReferenceArguments, total=False):
    """Keyword arguments of every optimizer operator.

    Tensors are on the parameters' device. None turns an optional tensor off.

    maximize: ascend the gradient instead of descending it.
    lr_tensor: replaces lr; its sign is not checked. ``lr_tensor``, ``grad_scale``, ``clip_coef`` and
        ``found_inf`` each hold one fp32 element. The GPU reads them itself, so the host does not wait, and a
        CUDA graph can replay the step.
    grad_scale: divides the gradients.
    clip_coef: multiplies the gradients.
    found_inf: if it is not zero, the step changes nothing, except that it still zeroes ``accumulated``.
    weight_remainder: (elements of the arena), int16. A bf16 weight and its remainder together hold one fp32
        weight, which the step changes exactly as it would change an fp32 parameter. The weight is the upper
        half of that fp32 value, rounded to nearest (halves away from zero): ``bits(fp32) = (bits(weight) <<
        16) + remainder``.
    accumulated: (elements of the arena), fp32 or bf16. The step adds it to the gradients and then zeroes it,
        for each parameter that has a gradient.
    stochastic_rounding: rounds bf16 weights up or down at random so that the expected value is exact, instead
        of to nearest.
    seed: seeds all random bits. They are a function of the seed, the step, the number of the parameter and
        the index of the element in the parameter.
    numbers: the numbers of the parameters for random bits, each below 2^20. Empty means their indices in
        ``params``.
    first_block, blocks: step only ``blocks`` blocks of 256 elements, starting at block ``first_block`` of the
        first parameter; the arenas hold just these blocks. ``blocks=None`` steps whole parameters. Only CPU
        operators that apply an elementwise rule support this; references do not.
    """

    first_block: int
    blocks: int | None


class ReferenceArena(NamedTuple):
    """One moment of all parameters: fp32 or bf16 values without scales, or codes with scales.

    signed: whether the moment may be negative. keeps: the share of the moment that survives a step (its
    beta).
    """

    values: Tensor
    scale: Tensor | None
    signed: bool
    keeps: float

    @property
    def is_4bit(self) -> bool:
        """Whether the codes have 4 bits, which shows in the ratio of scales to bytes."""
        return self.scale is not None and self.scale.numel() * STATE_BLOCK != self.values.numel()

    def read(self, where: slice) -> Tensor:
        """Return one parameter's moment in fp32.

        ``where`` is the parameter's slice of the arena, which starts at a multiple of 256.
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
        """Store one parameter's moment at ``where``.

        Quantises the moment if the arena has scales, and rounds it stochastically if the arena is bf16.
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


def places(params: Sequence[Tensor]) -> list[slice]:
    """Return the slice of the arena that holds each parameter's state."""
    found, begin = [], 0
    for param in params:
        found.append(slice(begin, begin + param.numel()))
        begin += -(-param.numel() // STATE_BLOCK) * STATE_BLOCK
    return found


def philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int = 7) -> list[Tensor]:
    """Return the Philox 4x32 random words (Salmon et al., SC 2011) of four counters.

    Args:
        counter: four int64 tensors, each element a 32-bit word.
        key: two 32-bit words.
        rounds: the number of Philox rounds.
    """
    c0, c1, c2, c3 = counter
    mask = 0xFFFFFFFF
    for i in range(rounds):
        key0, key1 = (key[0] + i * 0x9E3779B9) & mask, (key[1] + i * 0xBB67AE85) & mask
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 products wrap modulo 2^64
        c0, c1, c2, c3 = (b >> 32) & mask ^ c1 ^ key0, b & mask, (a >> 32) & mask ^ c3 ^ key1, a & mask
    return [c0, c1, c2, c3]


def random_bits(seed: int, step: int, number: int, stream: int, count: int) -> Tensor:
    """Return 16 random bits (int64) for each of the ``count`` elements of a parameter.

    ``stream`` is 0 for the weight and 1 + k for moment k. Counter ``i``, whose other words hold the step, the
    number and the stream, serves elements 8 i to 8 i + 7. Each of its four output words gives its lower half
    to one element and its upper half to the next.
    """
    index = torch.arange((count + 7) // 8)
    counter = [index, index >> 32, torch.full_like(index, step), torch.full_like(index, number << 3 | stream)]
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).flatten()[:count]


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16. The magnitude is rounded up with a probability equal to the discarded fraction."""
    up = (x.view(torch.int32).long() + random) >> 16
    return torch.where(x.isnan(), x.bfloat16(), up.to(torch.int16).view(torch.bfloat16))


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 value that a bf16 weight and its int16 remainder make."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into a bf16 weight and an int16 remainder. Every NaN becomes the same NaN."""
    bits = torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32).long())
    remainder = bits.to(torch.int16)
    return ((bits - remainder.long()) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def reference_step(
    rule: Callable[..., Sequence[Tensor]],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
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
    extra: Sequence[Sequence[Tensor]] = (),
    numbers: Sequence[int] = (),
) -> None:
    """Run one optimizer step in plain PyTorch, one parameter at a time.

    ``rule(lr, step, p, g, moment, ...)`` returns the new p and the new moments, all fp32 and in the
    parameter's shape. After the moments, the rule receives the parameter's tensors from ``extra``, which it
    changes in place.
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

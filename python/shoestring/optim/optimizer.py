"""Arguments that all optimizer operators share, and the step loop of the ``*_reference`` functions."""

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
    """Keyword arguments of every ``*_reference`` function.

    ``StepArguments`` adds the arguments that step a part of a parameter.
    """

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

    All tensors are on the parameters' device. None disables an optional tensor.

    maximize: ascend the gradient instead of descending it.
    lr_tensor: replaces lr; its sign is not checked. ``lr_tensor``, ``grad_scale``, ``clip_coef`` and
        ``found_inf`` each hold one fp32 element. The GPU reads them itself, so the host does not wait, and a
        CUDA graph can replay the step.
    grad_scale: divides the gradients.
    clip_coef: multiplies the gradients.
    found_inf: if the element is not zero, the step changes nothing, except that it sets ``accumulated`` to
        zero.
    weight_remainder: int16, as many elements as the flat state tensors. A bf16 weight and its remainder
        together hold one fp32 weight, which the step changes exactly as it would change an fp32 parameter.
        The weight is the upper half of that fp32 value, rounded to nearest (halves away from zero):
        ``bits(fp32) = (bits(weight) << 16) + remainder``.
    accumulated: gradient sums over micro-batches, fp32 or bf16, as many elements as the flat state tensors.
        For each parameter that has a gradient, the step adds the sum to the gradient and then sets the sum to
        zero.
    stochastic_rounding: rounds bf16 weights up or down at random so that the expected value is exact, instead
        of to nearest.
    seed: seed of the random bits. Random bits are a function of the seed, the step, the parameter's entry in
        ``numbers`` and the index of the element in the parameter.
    numbers: one integer below 2^20 for each parameter, on which its random bits depend. Empty means the
        indices of the parameters in ``params``.
    first_block, blocks: step only ``blocks`` blocks of 256 elements, starting at block ``first_block`` of the
        first parameter. The state tensors hold just these blocks. ``blocks=None`` steps whole parameters.
        Only CPU operators whose update rule is elementwise can step a part.
    """

    first_block: int
    blocks: int | None


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


def places(params: Sequence[Tensor]) -> list[slice]:
    """Return, for each parameter, the slice of the flat state tensors that holds its state."""
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

    ``stream`` is 0 for the weight and 1 + k for moment k. The Philox counter consists of an index i, the
    step, ``number`` and ``stream``. Its four output words serve elements 8 i to 8 i + 7: the lower half of a
    word serves one element, the upper half the next.
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
    """Combine a bf16 weight and its int16 remainder to the fp32 weight that both together store."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split an fp32 weight into a bf16 weight and an int16 remainder. All NaNs become one NaN bit pattern."""
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

"""What the optimizers' operators share: their arguments beside a rule's numbers, and what makes a rule a reference."""

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
    """Keyword arguments of every reference: those of ``StepArguments`` that apply to whole parameters."""

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
    """Of every optimizer's operator. Tensors are on the parameters' device, and None where they are absent.

    maximize: ascend instead.
    lr_tensor: in place of lr; its sign is not checked. This and the next three are one fp32 element each: a GPU reads
        them itself, so the host does not wait, and a CUDA graph replays the step.
    grad_scale: gradients are divided by it.
    clip_coef: gradients are multiplied by it.
    found_inf: where it is not zero, nothing changes (but that ``accumulated`` becomes zero).
    weight_remainder: (elements of the arena), int16: with each bf16 weight it makes an fp32, which the step changes
        exactly as it would change an fp32 weight. The weight is its upper half, rounded to nearest (halves away from
        zero): ``bits(fp32) = (bits(weight) << 16) + remainder``.
    accumulated: (elements of the arena), fp32 or bf16: added to the gradients, and then zero, of parameters with one.
    stochastic_rounding: bf16 weights are rounded up or down so that the mean is right, in place of to nearest.
    seed: of all random bits, which are a function of it, the step, the parameter's number and the element's place in the
        parameter.
    numbers: of the parameters, below 2^20; none: their indices.
    first_block, blocks: the arenas hold just so many blocks of 256 elements, from first_block of the first parameter on,
        and only these are stepped (on the CPU; references step whole parameters, as do operators that are more than a
        rule). None: those of whole parameters.
    """

    first_block: int
    blocks: int | None


class ReferenceArena(NamedTuple):
    """A moment of all parameters: fp32 or bf16 without scales, or codes.

    signed: whether it may be negative. keeps: how much of it stays in a step.
    """

    values: Tensor
    scale: Tensor | None
    signed: bool
    keeps: float

    @property
    def is_4bit(self) -> bool:
        """Whether codes have 4 bits: then there are more scales for each byte."""
        return self.scale is not None and self.scale.numel() * STATE_BLOCK != self.values.numel()

    def read(self, where: slice) -> Tensor:
        """A parameter's part as fp32: elements ``where``, from a multiple of 256 on."""
        if self.scale is None:
            return self.values[where].float()
        if self.is_4bit:
            codes, scales = self._blocks_4bit(where, self.scale)
            return dequantize_state_4bit_reference(
                self.values[codes], self.scale[scales], signed=self.signed, numel=where.stop - where.start
            )
        return dequantize_8bit_reference(self.values[where], self.scale[_blocks(where)], signed=self.signed)

    def write(self, where: slice, moment: Tensor, step: int, random: Callable[[], Tensor]) -> None:
        """The same back: rounded to codes where the arena has scales, and at random where it is bf16."""
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
    """Where in an arena the state of each parameter lies."""
    found, begin = [], 0
    for param in params:
        found.append(slice(begin, begin + param.numel()))
        begin += -(-param.numel() // STATE_BLOCK) * STATE_BLOCK
    return found


def philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int = 7) -> list[Tensor]:
    """Philox 4x32 (Salmon et al., SC 2011) of counters in four int64 tensors of 32 bits each."""
    c0, c1, c2, c3 = counter
    mask = 0xFFFFFFFF
    for i in range(rounds):
        key0, key1 = (key[0] + i * 0x9E3779B9) & mask, (key[1] + i * 0xBB67AE85) & mask
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64
        c0, c1, c2, c3 = (b >> 32) & mask ^ c1 ^ key0, b & mask, (a >> 32) & mask ^ c3 ^ key1, a & mask
    return [c0, c1, c2, c3]


def random_bits(seed: int, step: int, number: int, stream: int, count: int) -> Tensor:
    """16 random bits (int64) for each of the ``count`` elements of a parameter, for its weight (stream 0) or a moment.

    Counter ``i`` (with step, number and stream in its other words) has those of elements 8 i to 8 i + 7: the lower and
    then the upper half of each of its four words.
    """
    index = torch.arange((count + 7) // 8)
    counter = [index, index >> 32, torch.full_like(index, step), torch.full_like(index, number << 3 | stream)]
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).flatten()[:count]


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """fp32 as bf16: up, in magnitude, with the probability of what is cut off."""
    up = (x.view(torch.int32).long() + random) >> 16
    return torch.where(x.isnan(), x.bfloat16(), up.to(torch.int16).view(torch.bfloat16))


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 that a bf16 weight and its int16 remainder make."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 as bf16 weight and int16 remainder; NaN is one NaN."""
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
    """An operator in plain PyTorch, a tensor at a time.

    ``rule(lr, step, p, g, moment, ...)`` returns the new p and moments; all are fp32 and of the parameter's shape. After
    the moments it is given what ``extra`` has for the parameter, which it changes in place.
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

"""Test cases for the optimizer operators: operator, reference, options, and state in flat tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from references.optim import (
    adafactor_reference,
    adamw_reference,
    ademamix_reference,
    apply_reference,
    came_reference,
    ema_reference,
    lamb_reference,
    lion_reference,
    muon_reference,
    schedule_free_adamw_reference,
    sgd_reference,
)
from shoestring.ops import dequantize_8bit, dequantize_state_4bit
from shoestring.quantization.quantize_state_4bit import GROUP_4BIT

OPS = torch.ops.shoestring
STATE_BLOCK = 256


def plain(moment: Tensor, scale: Tensor | None, signed: bool) -> Tensor:
    """Return the fp32 values of a flat tensor that holds one moment of all parameters."""
    if scale is None:
        return moment.float()
    if scale.numel() * STATE_BLOCK == moment.numel():
        return dequantize_8bit(moment, scale, signed=signed)
    return dequantize_state_4bit(moment, scale, signed=signed, numel=2 * moment.numel())


def blocks(size: int) -> int:
    return -(-size // STATE_BLOCK)


@dataclass(frozen=True)
class Rule:
    """An optimizer operator, its reference in plain PyTorch, and its options.

    Args:
        moments: by the name of a moment, whether its values may be negative.
        hyper: by the name of a hyperparameter, its value.
        extra: by the name of another state tensor, the function from the shape of a parameter to the shape of
            this tensor.
        long: names of the moments that are never quantised, and so have no scale.
    """

    name: str
    step: Callable[..., None]
    reference: Callable[..., None]
    moments: dict[str, bool]
    hyper: dict[str, float | bool] = field(default_factory=dict)
    extra: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    long: tuple[str, ...] = ()

    def arenas(self, sizes: Sequence[int], state: str) -> list[Tensor | None]:
        """Return the state before the first step: the step counts, and an arena with its scales for each moment.

        An arena is a flat tensor that holds one moment of all parameters. In the list, its scales follow it,
        or None if `state` is a format without scales. Moments that are never quantised (named in
        ``self.long``) have no entry for scales.
        """
        total = sum(map(blocks, sizes))
        found: list[Tensor | None] = [torch.zeros(len(sizes))]
        for name, signed in self.moments.items():
            if name in self.long:
                dtype = torch.float32 if state == "fp32" else torch.bfloat16
                found += [torch.zeros(total * STATE_BLOCK, dtype=dtype)]
            elif state in ("fp32", "bf16"):
                dtype = torch.float32 if state == "fp32" else torch.bfloat16
                found += [torch.zeros(total * STATE_BLOCK, dtype=dtype), None]
            elif state == "8bit":
                found += [torch.zeros(total * STATE_BLOCK, dtype=torch.uint8), torch.zeros(total)]
            else:
                scales = torch.zeros(total * STATE_BLOCK // GROUP_4BIT[signed])
                found += [torch.zeros(total * STATE_BLOCK // 2, dtype=torch.uint8), scales]
        return found

    def extras(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[Tensor]]:
        """Return the `extra` state tensors before the first step: for each name, one tensor per parameter."""
        return {name: [torch.zeros(shape(s)) for s in shapes] for name, shape in self.extra.items()}

    def arena_names(self) -> list[str]:
        scaled = ([name] if name in self.long else [name, f"{name}_scale"] for name in self.moments)
        return ["step", *(name for names in scaled for name in names)]

    def values(self, sizes: Sequence[int], arena: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the fp32 moments of all parameters in flat tensors, without the padding between them."""
        begins = [STATE_BLOCK * sum(map(blocks, sizes[:i])) for i in range(len(sizes))]
        kept = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, sizes, strict=True)])
        by_name = dict(zip(self.arena_names(), arena, strict=True))
        return [plain(by_name[n], by_name.get(f"{n}_scale"), s)[kept] for n, s in self.moments.items()]


ADAMW = Rule(
    "adamw",
    OPS.adamw_,
    adamw_reference,
    {"exp_avg": True, "exp_avg_sq": False},
    dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
)
LION = Rule(
    "lion",
    OPS.lion_,
    lion_reference,
    {"exp_avg": True},
    dict(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1),
)
SGD = Rule(
    "sgd",
    OPS.sgd_,
    sgd_reference,
    {"momentum_buffer": True},
    dict(lr=1e-2, momentum=0.9, dampening=0.25, weight_decay=0.1),
)
NESTEROV = Rule(
    "nesterov", OPS.sgd_, sgd_reference, SGD.moments, SGD.hyper | dict(dampening=0.0, nesterov=True)
)
APPLY = Rule("apply", OPS._apply_, apply_reference, {}, dict(lr=1e-2, weight_decay=0.1))
ADEMAMIX = Rule(
    "ademamix",
    OPS.ademamix_,
    ademamix_reference,
    {"exp_avg": True, "exp_avg_slow": True, "exp_avg_sq": False},
    dict(
        lr=1e-2,
        beta1=0.9,
        beta2=0.999,
        beta3=0.99,
        alpha=2.0,
        eps=1e-8,
        weight_decay=0.1,
        t_alpha=2,
        t_beta3=4,
    ),
    long=("exp_avg_slow",),
)
SCHEDULE_FREE = Rule(
    "schedule_free_adamw",
    OPS.schedule_free_adamw_,
    schedule_free_adamw_reference,
    {"offset": True, "exp_avg_sq": False},
    dict(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, warmup_steps=2),
    long=("offset",),
)
EMA = Rule(
    "ema",
    OPS._ema_,
    ema_reference,
    {"exp_avg": True},
    dict(lr=1e-2, beta=0.9, nesterov=True),
)

# The following operators need matrix products or reductions, not only elementwise arithmetic.
MUON = Rule(
    "muon", OPS.muon_, muon_reference, {"momentum_buffer": True}, dict(lr=0.1, momentum=0.9, weight_decay=0.1)
)
LAMB = Rule("lamb", OPS.lamb_, lamb_reference, ADAMW.moments, ADAMW.hyper | dict(lr=0.1))
FACTORED: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "row_var": lambda s: (*s[:-1], 1) if len(s) > 1 else (0,),
    "col_var": lambda s: (*s[:-2], 1, s[-1]) if len(s) > 1 else (0,),
    "variance": lambda s: (0,) if len(s) > 1 else tuple(s),
}
ADAFACTOR = Rule(
    "adafactor",
    partial(OPS.adafactor_, exp_avg=None, exp_avg_scale=None),
    adafactor_reference,
    {},
    dict(lr=0.1, weight_decay=0.1),
    FACTORED,
)
ADAFACTOR_MEAN = Rule(
    "adafactor",
    OPS.adafactor_,
    adafactor_reference,
    {"exp_avg": True},
    ADAFACTOR.hyper | dict(beta1=0.9),
    FACTORED,
)
# Without eps1, all elements of the first update of a vector have the same magnitude, so their codes are at a
# rounding boundary.
CAME = Rule(
    "came",
    OPS.came_,
    came_reference,
    {"exp_avg": True},
    dict(lr=1e-3, beta3=0.99, eps1=0.1, weight_decay=0.1),
    {
        f"exp_avg_{of}_{kept}": FACTORED[of_torch]
        for of in ("sq", "res")
        for kept, of_torch in (("row", "row_var"), ("col", "col_var"))
    }
    | {"exp_avg_sq": FACTORED["variance"]},
)

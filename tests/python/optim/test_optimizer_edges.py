"""Tests of edge cases of the optimizer operators: padding, remainders, NaNs, and weights of mixed dtypes."""

import pytest
import torch
from torch import Tensor

from optimizer_rules import ADAMW, LION, SGD, STATE_BLOCK, Rule, blocks
from references.optim import join, split

pytestmark = pytest.mark.device

RULES = pytest.mark.parametrize("rule", [ADAMW, LION, SGD], ids=lambda r: r.name)
ALL_ONES = 0x7FFFFFFF  # the largest positive bit pattern of fp32, which is a NaN


@RULES
@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_padding_counts_for_nothing(rule: Rule, capability: str, state: str) -> None:
    """State is padded to whole blocks of 256 elements. The contents of the padding do not change a step.

    The padding may differ after a load, since a loaded state is copied into memory whose padding is zero.
    """
    n = 300
    p, g, total = torch.randn(n), torch.randn(n), STATE_BLOCK * blocks(n)
    results = []
    # The test fills the padding with different codes. They include the code of the largest value of each
    # quantisation map.
    for value in (0x11, 0, 0x88, 0xFF):
        param, arenas, accumulated = p.clone(), rule.arenas([n], state), torch.full((total,), float(value))
        accumulated[:n] = 0
        for codes, scale in zip(arenas[1::2], arenas[2::2], strict=True):
            assert codes is not None and scale is not None
            codes.fill_(0x11)
            codes[n * codes.numel() // total :] = value
            scale.fill_(1.0)
        rule.step([param], [g], *arenas, **rule.hyper, accumulated=accumulated)
        scales = [s for s in arenas[2::2] if s is not None]
        results.append([param, *rule.values([n], arenas), *scales])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_step_of_nothing_keeps_every_half(capability: str) -> None:
    """A step with lr 0 keeps the weight and its remainder for all 2^16 lower halves of an fp32 number.

    The lower halves include the one that is exactly between two bf16 numbers.
    """
    for upper in (0x3F80, 0xBFFF - 0x10000):
        x = ((upper << 16) + torch.arange(2**16)).to(torch.int32).view(torch.float32)
        weight, remainder = split(x)
        before = weight.clone(), remainder.clone()
        options = LION.hyper | {"lr": 0.0, "weight_decay": 0.0}
        LION.step([weight], [x], *LION.arenas([x.numel()], "8bit"), **options, weight_remainder=remainder)
        assert torch.equal(weight, before[0]) and torch.equal(remainder, before[1])


@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_every_nan_stays_one(capability: str, kind: str) -> None:
    """NaNs stay NaNs when weights and moments are rounded to bf16.

    Rounding adds to the bit pattern. For a NaN whose mantissa bits are all ones, a plain addition would
    overflow to a number.
    """
    weight, n = torch.zeros(256).bfloat16(), 256
    grad = torch.full((n,), ALL_ONES, dtype=torch.int32).view(torch.float32)
    remainder = torch.zeros(n, dtype=torch.int16)
    options = dict(weight_remainder=remainder) if kind == "remainder" else dict(stochastic_rounding=True)
    arenas = SGD.arenas([n], "bf16")
    SGD.step([weight], [grad], *arenas, **SGD.hyper, **options)
    assert weight.isnan().all() and arenas[1].isnan().all()
    assert kind == "stochastic" or join(weight, remainder).isnan().all()


@RULES
@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_other_weights_are_rounded_to_nearest(rule: Rule, capability: str, kind: str) -> None:
    """Remainders and stochastic rounding change only the bf16 weights in a call, not its other weights."""
    sizes, dtypes = [300, 256, 300], [torch.float32, torch.float16, torch.bfloat16]
    start = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    grads = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    remainder = torch.randint(-(2**15), 2**15, (STATE_BLOCK * sum(map(blocks, sizes)),)).short()
    before = remainder.clone()
    results: list[list[Tensor]] = []
    for options in (
        {},
        dict(weight_remainder=remainder) if kind == "remainder" else dict(stochastic_rounding=True),
    ):
        params = [p.clone() for p in start]
        rule.step(params, grads, *rule.arenas(sizes, "8bit"), **rule.hyper, **options)
        results.append(params)
    plain, other = results
    assert (
        torch.equal(plain[0], other[0])
        and torch.equal(plain[1], other[1])
        and not torch.equal(plain[2], other[2])
    )
    ours = STATE_BLOCK * (blocks(sizes[0]) + blocks(sizes[1]))
    assert torch.equal(remainder[:ours], before[:ours])

"""Tests of weight rounding, remainders, mixed dtypes and gradient accumulation in optimizer operators."""

import math

import pytest
import torch
from torch import Tensor

from optimizer_rules import (
    ADAMW,
    ADEMAMIX,
    APPLY,
    EMA,
    LION,
    NESTEROV,
    SCHEDULE_FREE,
    SGD,
    STATE_BLOCK,
    Rule,
    blocks,
)
from references.optim import join, random_bits, round_stochastically, split

pytestmark = pytest.mark.device

# Element counts: several blocks of 256 with a partial last block, less than a SIMD register, one whole block,
# and one element.
SIZES = [700, 3, 256, 1]
EACH = [ADAMW, LION, SGD, NESTEROV, ADEMAMIX, SCHEDULE_FREE, APPLY, EMA]
RULES = pytest.mark.parametrize("rule", EACH, ids=lambda r: r.name)
STATES = pytest.mark.parametrize("state", ["8bit", "4bit", "bf16", "fp32"])


def total(sizes: list[int]) -> int:
    return STATE_BLOCK * sum(map(blocks, sizes))


def pairs(a: list[Tensor | None], b: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]


def remainders(params: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Split fp32 parameters into bf16 weights and one flat tensor of their remainders."""
    weights, arena, begin = [], torch.zeros(total([p.numel() for p in params]), dtype=torch.int16), 0
    for p in params:
        weight, arena[begin : begin + p.numel()] = split(p)
        weights.append(weight)
        begin += STATE_BLOCK * blocks(p.numel())
    return weights, arena


def whole(weights: list[Tensor], arena: Tensor) -> list[Tensor]:
    found, begin = [], 0
    for w in weights:
        found.append(join(w, arena[begin : begin + w.numel()]))
        begin += STATE_BLOCK * blocks(w.numel())
    return found


@RULES
@STATES
def test_a_remainder_is_an_fp32_weight(rule: Rule, capability: str, state: str) -> None:
    """bf16 weights with remainders get the same bits and state as fp32 weights that take the same steps.

    The test takes steps with fp32 gradients and then with bf16 gradients.
    """
    masters = [torch.randn(n) for n in SIZES]
    masters[0][:5] = torch.tensor([0.0, -0.0, 1e-40, 3e38, 1 + 2**-8])
    weights, arena = remainders(masters)
    ours, theirs = rule.arenas(SIZES, state), rule.arenas(SIZES, state)
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
        grads = [torch.randn(n).to(dtype) for n in SIZES]
        rule.step(weights, grads, *ours, **rule.hyper, weight_remainder=arena)
        rule.step(masters, grads, *theirs, **rule.hyper)
        for w, exact, master in zip(weights, whole(weights, arena), masters, strict=True):
            assert torch.equal(exact, master)
            rounded, ties = master.bfloat16(), master.view(torch.int32) & 0xFFFF == 0x8000
            assert torch.equal(w[~ties], rounded[~ties])
        assert all(torch.equal(a, b) for a, b in pairs(ours, theirs))


def test_splitting_is_exact_for_every_half() -> None:
    """Splitting an fp32 number into bf16 and remainder, and joining both, returns the number.

    The test covers all 2^16 lower halves for several upper halves of both signs, infinity, and NaN.
    """
    lower = torch.arange(2**16)
    for upper in (0x0000, 0x0001, 0x3F80, 0x3FFF, 0x7F7F, 0x8000, 0xBF80, 0xFF7F):
        x = ((upper << 16) + lower).to(torch.int32).view(torch.float32)
        weight, remainder = split(x)
        assert torch.equal(join(weight, remainder).view(torch.int32), x.view(torch.int32))
        step = (weight.float().double() - x.double()).abs()
        spacing = 2.0 ** (max(upper >> 7 & 0xFF, 1) - 127 - 7)
        assert step[weight.isfinite()].max() <= spacing / 2
    for special in (math.inf, -math.inf, math.nan):
        weight, remainder = split(torch.tensor([special]))
        torch.testing.assert_close(weight.float(), torch.tensor([special]), equal_nan=True)
        torch.testing.assert_close(join(weight, remainder), torch.tensor([special]), equal_nan=True)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", ["remainder", "stochastic"])
def test_special_weights_stay(capability: str, kind: str, special: float) -> None:
    weights, arena = remainders([torch.tensor([special, 1.0])])
    options = dict(weight_remainder=arena) if kind == "remainder" else dict(stochastic_rounding=True)
    for _ in range(3):
        LION.step(weights, [torch.ones(2)], *LION.arenas([2], "8bit"), **LION.hyper, **options)
    torch.testing.assert_close(weights[0][0].float(), torch.tensor(special), equal_nan=True)
    assert weights[0][1] < 1


@RULES
@STATES
def test_stochastic_rounding_is_the_references(rule: Rule, capability: str, state: str) -> None:
    """An operator's stochastic rounding agrees with that of its reference in 99 % of the weights.

    The reference adds in another order. The last bit may then differ, which rarely changes the rounding.
    """
    start = [torch.randn(n).bfloat16() for n in SIZES]
    params, expected = [p.clone() for p in start], [p.clone() for p in start]
    ours, theirs = rule.arenas(SIZES, state), rule.arenas(SIZES, state)
    options = dict(stochastic_rounding=True, seed=-(2**40) - 5, numbers=[2**20 - 1, 7, 0, 3])
    for _ in range(3):
        grads = [torch.randn(n).bfloat16() for n in SIZES]
        rule.step(params, grads, *ours, **rule.hyper, **options)
        rule.reference(expected, grads, *theirs, **rule.hyper, **options)
    differ = torch.cat(params) != torch.cat(expected)
    assert differ.sum() <= 0.01 * differ.numel() + 1
    nearest = [p.clone() for p in start]
    rule.step(nearest, grads, *rule.arenas(SIZES, state), **rule.hyper)
    assert (torch.cat(nearest) != torch.cat(params)).float().mean() > 0.05


def test_bits_are_those_of_the_place(capability: str) -> None:
    """A parameter stepped alone, with its index in `numbers`, is rounded as in a call with all parameters."""
    sizes = [300, 700, 40]
    start = [torch.randn(n).bfloat16() for n in sizes]
    grads = [torch.randn(n).bfloat16() for n in sizes]
    together = [p.clone() for p in start]
    options = dict(stochastic_rounding=True, seed=7)
    ADAMW.step(together, grads, *ADAMW.arenas(sizes, "bf16"), **ADAMW.hyper, **options)
    for i, p in enumerate(start):
        arenas = ADAMW.arenas([sizes[i]], "bf16")
        ADAMW.step([p], [grads[i]], *arenas, **ADAMW.hyper, **options, numbers=[i])
        assert torch.equal(p, together[i])
    other = [p.clone() for p in start]
    ADAMW.step(other, grads, *ADAMW.arenas(sizes, "bf16"), **ADAMW.hyper, stochastic_rounding=True, seed=8)
    assert not torch.equal(other[1], together[1])


def test_stochastic_rounding_is_right_in_the_mean(capability: str, backend: str) -> None:
    """Stochastic rounding applies an update of 1/16 of bf16's spacing to one weight in 16, within 5 sigma."""
    n = 2**13 if backend == "simt" else 2**16
    spacing = 2.0**-7  # distance between neighbouring bf16 numbers in [1, 2)
    p = torch.ones(n, dtype=torch.bfloat16)
    options = dict(lr=spacing / 16, beta1=0.0, beta2=0.0, weight_decay=0.0)
    LION.step([p], [-torch.ones(n)], *LION.arenas([n], "fp32"), **options, stochastic_rounding=True, seed=3)
    moved = (p == 1 + spacing).sum().item()
    assert (p == 1).sum() + moved == n
    assert abs(moved - n / 16) < 5 * math.sqrt(n * 15) / 16
    q = torch.ones(n, dtype=torch.bfloat16)
    LION.step([q], [-torch.ones(n)], *LION.arenas([n], "fp32"), **options)
    assert (q == 1).all()  # rounding to nearest loses an update of 1/16 of the spacing


def test_random_bits_are_uniform_and_their_own() -> None:
    """Random bits for rounding are uniform, and differ between steps, parameters, elements and seeds.

    They also differ between random streams (one for the weights and one for each moment). Each of 16 bits is
    set in half of 2^15 draws, within 5 sigma.
    """
    n = 2**15
    draws = [random_bits(1, 1, 0, 0, 2 * n)[:n], random_bits(1, 2, 0, 0, n), random_bits(1, 1, 1, 0, n)]
    draws += [random_bits(1, 1, 0, 1, n), random_bits(2, 1, 0, 0, n), random_bits(1, 1, 0, 0, 2 * n)[n:]]
    for i, a in enumerate(draws):
        for bit in range(16):
            assert abs((a >> bit & 1).sum().item() - n / 2) < 5 * math.sqrt(n) / 2
        for b in draws[:i]:
            assert (a == b).float().mean() < 1e-3


@pytest.mark.parametrize("value", [1.0, -1.0, 3e38, 1e-40, 0.0])
def test_rounding_by_hand(value: float) -> None:
    """Stochastic rounding rounds magnitudes down if all random bits are 0, and up if all are 1.

    A value that bf16 represents exactly does not change.
    """
    x = torch.tensor([value, value])
    low, high = round_stochastically(x, torch.tensor([0, 0xFFFF])).view(torch.int16).int()
    bits = x.view(torch.int32)[0] >> 16
    assert low == bits and high == bits + int(x.view(torch.int32)[0] & 0xFFFF != 0)


@RULES
@STATES
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_another_dtype(rule: Rule, capability: str, weight: torch.dtype, state: str) -> None:
    """A gradient of any dtype gives the same bits as its copy in fp32, for weights of any dtype."""
    start = [torch.randn(n).to(weight) for n in SIZES]
    for other in (torch.bfloat16, torch.float16, torch.float32):
        grads = [torch.randn(n).to(other) for n in SIZES]
        results = []
        for dtype in (other, torch.float32):
            params, arenas = [p.clone() for p in start], rule.arenas(SIZES, state)
            for _ in range(2):
                rule.step(params, [g.to(dtype) for g in grads], *arenas, **rule.hyper)
            results.append([*params, *arenas])
        assert all(torch.equal(a, b) for a, b in pairs(*results))


@RULES
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sum_", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulated_gradients(rule: Rule, capability: str, weight: torch.dtype, sum_: torch.dtype) -> None:
    """A step adds the accumulated gradient sums to the gradients in fp32.

    Afterwards the sums are zero for parameters with a gradient, and unchanged for the other parameters.
    """
    start = [torch.randn(n).to(weight) for n in SIZES]
    accumulated = torch.randn(total(SIZES)).to(sum_)
    before = accumulated.clone()
    grads = [torch.randn(n).to(weight) for n in SIZES]
    grads[2] = None
    begins = [total(SIZES[:i]) for i in range(len(SIZES))]
    sums = [
        None if g is None else g.float() + before[b : b + g.numel()].float()
        for g, b in zip(grads, begins, strict=True)
    ]
    results = []
    for given, options in ((grads, {"accumulated": accumulated}), (sums, {})):
        params, arenas = [p.clone() for p in start], rule.arenas(SIZES, "8bit")
        rule.step(params, given, *arenas, **rule.hyper, **options)
        results.append([*params, *arenas])
    assert all(torch.equal(a, b) for a, b in pairs(*results))
    for n, b, g in zip(SIZES, begins, grads, strict=True):
        left = accumulated[b : b + n]
        assert torch.equal(left, before[b : b + n]) if g is None else (left == 0).all()


def test_a_skipped_step_drops_what_was_accumulated(capability: str) -> None:
    params, arenas, accumulated = (
        [torch.ones(300), torch.ones(5)],
        SGD.arenas([300, 5], "8bit"),
        torch.ones(768),
    )
    found = torch.ones(1)
    SGD.step(params, [torch.ones(300), None], *arenas, **SGD.hyper, accumulated=accumulated, found_inf=found)
    assert all((p == 1).all() for p in params) and all((t == 0).all() for t in arenas)
    assert (accumulated[:512] == 0).all() and (accumulated[512:517] == 1).all()


def test_a_second_moment_in_bf16_can_decay(capability: str) -> None:
    """A bf16 second moment decays to 0.999^1000 in 1,000 steps with zero gradients.

    With rounding to nearest the moment would stay constant, because 0.1 % is less than half the spacing of
    bf16.
    """
    p, arenas = torch.zeros(2048), ADAMW.arenas([2048], "bf16")
    arenas[3].fill_(1.0)
    for _ in range(1000):
        ADAMW.step([p], [torch.zeros(2048)], *arenas, **ADAMW.hyper)
    v = arenas[3].float()
    assert abs(v.mean().item() / 0.999**1000 - 1) < 0.01
    assert v.std() < 0.1


BAD = {
    "weight_remainder: expected a contiguous Short tensor of shape \\(768\\)": dict(
        weight_remainder=torch.zeros(768)
    ),
    "accumulated: expected a contiguous Float tensor of shape \\(768\\)": dict(accumulated=torch.zeros(512)),
    "accumulated: expected a contiguous Float": dict(accumulated=torch.zeros(768).half()),
    "numbers: expected none or one for each of 2 parameters, received 1": dict(numbers=[1]),
    "numbers: expected numbers in \\[0, 2\\^20\\), received 1048576": dict(numbers=[0, 2**20]),
    "stochastic_rounding: expected False with weight_remainder": dict(
        weight_remainder=torch.zeros(768, dtype=torch.int16), stochastic_rounding=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument(message: str) -> None:
    params, arenas = [torch.ones(300).bfloat16(), torch.ones(20)], ADAMW.arenas([300, 20], "8bit")
    options = {k: v.to(params[0].device) if isinstance(v, Tensor) else v for k, v in BAD[message].items()}
    with pytest.raises(RuntimeError, match=f"adamw_: {message}"):
        ADAMW.step(params, [torch.ones(300), torch.ones(20)], *arenas, **ADAMW.hyper, **options)
    assert all((p == 1).all() for p in params) and all((t == 0).all() for t in arenas)

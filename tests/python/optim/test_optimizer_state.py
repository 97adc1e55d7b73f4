"""Tests of the bytes that each optimizer's state takes in each format, and of resuming with the same bits."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.profiler import profile

from shoestring.optim import (
    APOLLO,
    CAME,
    LAMB,
    SGD,
    Adafactor,
    AdamW,
    AdEMAMix,
    GaLore,
    Lion,
    Muon,
    ScheduleFreeAdamW,
)

pytestmark = pytest.mark.device

SIZES = ((3, 100), (1,), (257,), (20, 40), (0,))


@dataclass(frozen=True)
class Rule:
    """A test case: an optimizer class, and the state that it should keep for a parameter.

    Args:
        make: the optimizer class.
        signed: for each quantised moment, whether its values may be negative.
        options: options of the optimizer.
        stepped: function from the shape of a parameter to the shape of its moments.
        extra: function from the shape of a parameter and its bytes per element to the bytes of its other
            state.
        weights: "fp32" for fp32 weights, and the `weights` options to test with bf16 weights.
        sizes: shapes of the parameters.
        long: number of moments that are never quantised. They are bf16, or fp32 if the other state is fp32.
    """

    make: Callable[..., torch.optim.Optimizer]
    signed: tuple[bool, ...]
    options: dict[str, Any] = field(default_factory=dict)
    stepped: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    extra: Callable[[tuple[int, ...], int], int] = lambda shape, item: 0
    weights: tuple[str, ...] = ("fp32", "nearest", "stochastic", "remainder")
    sizes: tuple[tuple[int, ...], ...] = SIZES
    long: int = 0


RANK = 8


def projected(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and min(shape) >= RANK


LOW_RANK: dict[str, Any] = dict(
    signed=(True, False),
    options={"rank": RANK, "update_proj_gap": 4},
    stepped=lambda shape: (RANK, max(shape)) if projected(shape) else shape,
    weights=("fp32", "nearest"),
)
MATRICES = ((3, 100), (20, 40), (1, 257), (0, 3))


def factored(shape: tuple[int, ...], item: int) -> int:
    """Return the bytes of a factored second moment (row and column means), or of a vector's second moment."""
    return 4 * (sum(shape) if len(shape) == 2 else torch.Size(shape).numel())


RULES = {
    "adamw": Rule(AdamW, (True, False)),
    "lion": Rule(Lion, (True,)),
    "sgd": Rule(SGD, (True,), {"dampening": 0.25}),
    "nesterov": Rule(SGD, (True,), {"nesterov": True}),
    "galore": Rule(GaLore, extra=lambda shape, item: projected(shape) * item * RANK * min(shape), **LOW_RANK),
    "apollo": Rule(APOLLO, extra=lambda shape, item: projected(shape) * 4, **LOW_RANK),
    "ademamix": Rule(AdEMAMix, (True, False), {"t_alpha": 4, "t_beta3": 4}, long=1),
    "schedule free": Rule(ScheduleFreeAdamW, (False,), {"warmup_steps": 4}, long=1),
    "lamb": Rule(LAMB, (True, False), {"weight_decay": 0.1}),
    "muon": Rule(Muon, (True,), sizes=MATRICES),
    "adafactor": Rule(Adafactor, (), extra=factored),
    "adafactor mean": Rule(Adafactor, (True,), {"beta1": 0.9}, extra=factored),
    "came": Rule(CAME, (True,), extra=lambda shape, item: len(shape) * factored(shape, item)),
}
# Bytes of a moment per 256 elements, including fp32 scales. The first number is for moments whose values may
# be negative, the second for others.
BYTES = {
    "8bit": (256 + 4, 256 + 4),
    "4bit": (128 + 4 * 8, 128 + 4 * 2),
    "bf16": (512, 512),
    "fp32": (1024, 1024),
}
REMAINDER = 512

EVERY = pytest.mark.parametrize(
    ("rule", "state", "weights"),
    [
        pytest.param(rule, state, weights, id=f"{name}-{state}-{weights}")
        for name, rule in RULES.items()
        for state in BYTES
        for weights in rule.weights
    ],
)


def made(rule: Rule, params: list[Parameter], state: str, weights: str) -> torch.optim.Optimizer:
    return rule.make(
        params,
        state_format=state,
        weight_rounding="nearest" if weights == "fp32" else weights,
        **rule.options,
    )


def parameters(sizes: tuple[tuple[int, ...], ...], weights: str) -> list[Parameter]:
    return [
        Parameter(torch.randn(size).to(torch.float32 if weights == "fp32" else torch.bfloat16))
        for size in sizes
    ]


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.sample(70)
@EVERY
def test_bitwise_resume(rule: Rule, state: str, weights: str) -> None:
    """Optimizers from a saved file, a deep copy or a pickle continue with the same weights and state."""
    through = parameters(rule.sizes, weights)
    straight = made(rule, through, state, weights)
    train(straight, through, range(3))
    torch.save(straight.state_dict(), file := io.BytesIO())
    resumed = [Parameter(p.detach().clone()) for p in through]
    loaded = made(rule, resumed, state, weights)
    loaded.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    copies = [copy.deepcopy(straight), pickle.loads(pickle.dumps(straight))]

    train(straight, through, range(3, 6))
    for other in (loaded, *copies):
        params = other.param_groups[0]["params"]
        train(other, params, range(3, 6))
        for p, q in zip(through, params, strict=True):
            assert torch.equal(p, q)
            assert straight.state[p].keys() == other.state[q].keys()
            for name, value in straight.state[p].items():
                twin = other.state[q][name]
                assert torch.equal(value, twin) if torch.is_tensor(value) else value == twin, name


def formula(rule: Rule, state: str, weights: str, shape: tuple[int, ...]) -> int:
    """Return the expected bytes of a parameter's state: moments, remainder, step count, and other state."""
    block = sum(BYTES[state][0 if signed else 1] for signed in rule.signed) + REMAINDER * (
        weights == "remainder"
    )
    block += rule.long * (1024 if state == "fp32" else 512)
    blocks = -(-torch.Size(rule.stepped(shape)).numel() // 256)
    return blocks * block + 4 + rule.extra(shape, 4 if weights == "fp32" else 2)


@pytest.mark.sample(70)
@EVERY
def test_memory_is_the_formula(rule: Rule, state: str, weights: str, backend: str) -> None:
    """The bytes of an optimizer's state tensors equal the documented formula.

    The memory that the first step leaves allocated is within 1 % of the formula. Only for this comparison, one
    parameter is so large that the other memory of the step does not matter. The CUDA emulator's allocator adds
    a gap after each allocation, so there the memory is not compared.
    """
    sizes = rule.sizes if backend == "simt" else ((512, 512), *rule.sizes)
    params = parameters(sizes, weights)
    optimizer = made(rule, params, state, weights)
    for p in params:
        p.grad = torch.ones_like(p)
    with profile(profile_memory=True, acc_events=True) as memory:
        optimizer.step()
    expected = sum(formula(rule, state, weights, shape) for shape in sizes)
    storages = [
        t.untyped_storage()
        for entry in optimizer.state.values()
        for t in entry.values()
        if torch.is_tensor(t)
    ]
    assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == expected
    if backend == "simt":
        return
    device = "self_device_memory_usage" if backend == "cuda" else "self_cpu_memory_usage"
    left = sum(getattr(event, device) for event in memory.key_averages())
    # CUDA's allocator rounds each size up to a multiple of 512 bytes.
    assert left == pytest.approx(expected, rel=0.01, abs=512 * len(storages) if backend == "cuda" else 0)


def test_a_state_dict_brings_its_format() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(512)) for _ in range(2))
    saved = AdamW([weight], state_format="8bit", min_quantize_size=0)
    weight.grad = torch.ones(512)
    saved.step()
    loaded = AdamW([other], state_format="4bit", min_quantize_size=0)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["state_format"] == "8bit"
    assert torch.equal(loaded.state[other]["exp_avg"], saved.state[weight]["exp_avg"])

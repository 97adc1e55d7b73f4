"""Tests of shoestring.optim.Lion and SGD, and of loading state from bitsandbytes and torch.optim."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoestring.ops import dequantize_8bit, quantize_8bit
from shoestring.optim import SGD, Lion

SIZES = [(20, 13), (1,), (257,), (0,), (4099,)]
MOMENT = {Lion: "exp_avg", SGD: "momentum_buffer"}


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def twins(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


class PlainLion(torch.optim.Optimizer):
    """Reference implementation of Lion in plain PyTorch: algorithm 2 of the Lion paper."""

    def __init__(
        self, params: list[Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.sub_(lr * (update + group["weight_decay"] * p))
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


SGDS = [
    dict(lr=0.03, momentum=0.8, weight_decay=0.1),
    dict(lr=0.03, momentum=0.8, weight_decay=0.1, nesterov=True),
    dict(lr=0.03, momentum=0.8, dampening=0.5, maximize=True),
]
CASES = [(Lion, PlainLion, dict(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1))]
CASES += [(SGD, torch.optim.SGD, options) for options in SGDS]


@pytest.mark.device
@pytest.mark.parametrize(("rule", "plain", "options"), CASES, ids=["lion", "sgd", "nesterov", "dampening"])
def test_fp32_state_is_the_plain_rule(rule: type, plain: type, options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    a, b = rule(ours, state_format="fp32", **options), plain(theirs, **options)
    train(a, ours, range(6))
    train(b, theirs, range(6))
    name = MOMENT[rule]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.state[p][name], b.state[q][name], rtol=1e-5, atol=1e-6)
        assert a.state[p]["step"] == 6


@pytest.mark.device
@pytest.mark.parametrize(("rule", "error"), [(Lion, 0.06), (SGD, 0.02)])
def test_8bit_state_follows_fp32(rule: type, error: float) -> None:
    """Training with 8-bit state stays close to training with fp32 state, relative to the weights' change.

    Lion has a larger limit, since quantisation can change the sign of an update.
    """
    ours, exact, start = parameters(), parameters(), parameters()
    train(rule(ours), ours, range(10))
    train(rule(exact, state_format="fp32"), exact, range(10))
    went = torch.cat([(q - s).flatten() for q, s in zip(exact, start, strict=True)])
    apart = torch.cat([(p - q).flatten() for p, q in zip(ours, exact, strict=True)])
    assert 0 < apart.norm() < error * went.norm()


@pytest.mark.device
@pytest.mark.parametrize("rule", [Lion, SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_resume(dtype: torch.dtype, rule: type) -> None:
    through = parameters(dtype)
    a = rule(through, min_quantize_size=200)
    train(a, through, range(3))
    torch.save(a.state_dict(), file := io.BytesIO())
    resumed = twins(through)
    b = rule(resumed)
    b.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(a, through, range(3, 6))
    train(b, resumed, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(through, resumed, strict=True))


@pytest.mark.device
@pytest.mark.parametrize("rule", [Lion, SGD])
def test_memory_formula(rule: type) -> None:
    for state, block in (("8bit", 260), ("fp32", 1024)):
        params = parameters()
        a = rule(params, state_format=state)
        train(a, params, range(1))
        storages = [t.untyped_storage() for entry in a.state.values() for t in entry.values()]
        sizes = {s.data_ptr(): s.nbytes() for s in storages}
        assert sum(sizes.values()) == sum(-(-p.numel() // 256) * block + 4 for p in params)


@pytest.mark.device
@pytest.mark.parametrize("rule", [Lion, SGD])
def test_clip_is_that_of_torch(rule: type) -> None:
    ours, plain = parameters(), parameters()
    a, b = rule(ours, state_format="fp32", max_grad_norm=2.0), rule(plain, state_format="fp32")
    for step in range(3):
        train(a, ours, range(step, step + 1))
        for p, q in zip(ours, plain, strict=True):
            q.grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain, 2.0)
        b.step()
        torch.testing.assert_close(a.grad_norm, norm, rtol=1e-6, atol=0)
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.state[p][MOMENT[rule]], b.state[q][MOMENT[rule]], rtol=1e-5, atol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_torch_sgd_and_back(state: str) -> None:
    theirs = parameters()
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.8)
    train(b, theirs, range(3))
    ours = twins(theirs)
    a = SGD(ours, state_format=state)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        entry, buffer = a.state[p], b.state[q]["momentum_buffer"]
        expected = buffer if state == "fp32" else quantize_8bit(buffer, signed=True)[0]
        assert torch.equal(entry["momentum_buffer"], expected)
    back = twins(ours)
    c = torch.optim.SGD(back, lr=1)
    c.load_state_dict(a.torch_state_dict())
    train(a, ours, range(3, 4))
    train(c, back, range(3, 4))
    # With torch_state_dict() loaded, torch.optim.SGD continues the momentum buffer instead of starting a new
    # one.
    for p, q in zip(ours, back, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    none = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError, match="SGD: momentum: expected a number above 0"):
        a.load_state_dict(none.state_dict())


@pytest.mark.parametrize("kind", ["Lion8bit", "Lion"])
def test_bitsandbytes_lion(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    theirs = parameters()
    b = getattr(bnb.optim, kind)(theirs, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)
    train(b, theirs, range(3))
    ours, saved = twins(theirs), b.state_dict()
    a = Lion(ours)
    a.load_state_dict(saved)
    assert a.param_groups[0]["betas"] == (0.8, 0.95) and "eps" not in a.param_groups[0]
    for i, p in enumerate(ours):
        tensors, entry = saved["state"][i]["__bnb_optimizer_quant_state__"], a.state[p]
        if tensors["state1"].dtype == torch.uint8:
            assert torch.equal(entry["exp_avg"], tensors["state1"])
            assert torch.equal(entry["exp_avg_scale"], tensors["absmax1"])
        else:
            assert torch.equal(entry["exp_avg"], quantize_8bit(tensors["state1"], signed=True)[0])

    def moments(p: Tensor) -> Tensor:
        return dequantize_8bit(a.state[p]["exp_avg"], a.state[p]["exp_avg_scale"], signed=True)

    exact = twins(ours)
    c = PlainLion(exact, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.1)
    for p, q in zip(ours, exact, strict=True):
        c.state[q]["exp_avg"] = moments(p)
    train(a, ours, range(3, 4))
    train(c, exact, range(3, 4))
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Lion(p, betas=(0.9, 1.0)), "Lion: betas: expected two numbers"),
        (lambda p: Lion(p, weight_decay=-1), "Lion: weight_decay: expected"),
        (lambda p: SGD(p, momentum=0), "SGD: momentum: expected a number above 0"),
        (
            lambda p: SGD(p, nesterov=True, dampening=0.1),
            "SGD: dampening: expected 0 with nesterov, received 0.1",
        ),
        (lambda p: SGD(p, lr=-1), "SGD: lr: expected"),
        (lambda p: Lion(p, state_format="3bit"), "Lion: state_format: expected"),
    ],
)
def test_bad_options(make: Callable[[list[Parameter]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())

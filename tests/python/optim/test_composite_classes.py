"""Tests of the results, state dicts and error messages of Muon, Adafactor, CAME, LAMB and AdEMAMix."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shoestring.optim import CAME, LAMB, Adafactor, AdEMAMix, Muon

MATRICES = [(20, 13), (7, 40), (1, 300)]
SIZES = [(20, 13), (300,), (3, 4, 50), (1,)]


def parameters(sizes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def named(x: object) -> str:
    return getattr(x, "__name__", "")


def apart(ours: list[Parameter], theirs: list[Parameter], start: list[Parameter]) -> float:
    """Return the distance of the weights `ours` from `theirs`, divided by that of `theirs` from `start`."""
    way = torch.cat([(q - s).detach().flatten() for q, s in zip(theirs, start, strict=True)])
    off = torch.cat([(p - q).detach().flatten() for p, q in zip(ours, theirs, strict=True)])
    return (off.norm() / way.norm()).item()


class PlainLAMB(torch.optim.Optimizer):
    """Reference implementation of LAMB in plain PyTorch: algorithm 2 of the LAMB paper."""

    def __init__(
        self, params: list[Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, steps=0))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (beta1, beta2), group["steps"] = group["betas"], group["steps"] + 1
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - beta1)
                v = self.state[p].setdefault("v", torch.zeros_like(p)).lerp_(p.grad**2, 1 - beta2)
                bias1, bias2 = 1 - beta1 ** group["steps"], 1 - beta2 ** group["steps"]
                r = m / bias1 / ((v / bias2).sqrt() + 1e-6) + group["weight_decay"] * p
                p.sub_(group["lr"] * p.norm() / r.norm() * r)


class PlainCAME(torch.optim.Optimizer):
    """Reference implementation of CAME in fp64: algorithm 2 of the CAME paper.

    As in the code of CAME's authors, vectors have no factored moments, and their update is not divided by the
    instability.
    """

    def __init__(
        self,
        params: list[Parameter],
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, dict(lr=lr, eps=eps, d=clip_threshold, betas=betas, weight_decay=weight_decay)
        )

    def mean(self, p: Parameter, name: str, x: torch.Tensor, beta: float) -> torch.Tensor:
        old = self.state[p].get(name, torch.zeros_like(x))
        self.state[p][name] = beta * old + (1 - beta) * x
        return self.state[p][name]

    def factored(self, p: Parameter, name: str, x: torch.Tensor, beta: float) -> torch.Tensor:
        r, c = self.mean(p, name + "r", x.sum(-1), beta), self.mean(p, name + "c", x.sum(-2), beta)
        return r[..., :, None] * c[..., None, :] / r.sum(-1)[..., None, None]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (beta1, beta2, beta3), (eps1, eps2), lr = group["betas"], group["eps"], group["lr"]
            for p in group["params"]:
                g, theta = p.grad.double(), self.state[p].setdefault("p", p.double())
                v = (self.factored if p.dim() > 1 else self.mean)(p, "v", g**2 + eps1, beta2)
                u = g / v.sqrt()
                u = u / max(1.0, (u.square().mean().sqrt() / group["d"]).item())
                update = m = self.mean(p, "m", u, beta1)
                if p.dim() > 1:
                    update = m / self.factored(p, "s", (u - m) ** 2 + eps2, beta3).sqrt()
                self.state[p]["p"] = theta - lr * group["weight_decay"] * theta - lr * update
                p.copy_(self.state[p]["p"])


# (optimizer, reference, options, sizes, allowed relative error). For Muon, the error comes from
# torch.optim.Muon's bf16 products. For the others, it comes from the order of sums, and from rounding fp32
# weights of about 1 that change by 0.1.
CASES = [
    (Muon, torch.optim.Muon, dict(lr=0.02, momentum=0.8), MATRICES, 5e-2),
    (Muon, torch.optim.Muon, dict(lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"), MATRICES, 5e-2),
    (Adafactor, torch.optim.Adafactor, dict(lr=0.05, weight_decay=0.1), SIZES, 1e-4),
    (Adafactor, torch.optim.Adafactor, dict(eps=(1e-3, 0.5), d=2.0, maximize=True), SIZES, 1e-4),
    (LAMB, PlainLAMB, dict(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1), SIZES, 1e-4),
    (CAME, PlainCAME, dict(lr=0.02), SIZES, 1e-5),
    (
        CAME,
        PlainCAME,
        dict(lr=0.02, betas=(0.8, 0.95, 0.9), weight_decay=0.1, clip_threshold=0.5),
        SIZES,
        1e-5,
    ),
    (CAME, PlainCAME, dict(lr=0.02, eps=(1e-1, 1e-2), betas=(0.5, 0.9, 0.9)), SIZES, 1e-5),
]


@pytest.mark.device
@pytest.mark.parametrize(("rule", "plain", "options", "sizes", "error"), CASES, ids=named)
def test_fp32_state_is_the_plain_rule(
    rule: type, plain: type, options: dict[str, Any], sizes: list[tuple[int, ...]], error: float
) -> None:
    ours, theirs = parameters(sizes), parameters(sizes)
    train(rule(ours, state_format="fp32", **options), ours, range(6))
    train(plain(theirs, **options), theirs, range(6))
    assert apart(ours, theirs, parameters(sizes)) < error


@pytest.mark.device
@pytest.mark.parametrize(
    ("rule", "options", "sizes", "error"),
    [
        (Muon, {}, MATRICES, 0.03),
        (LAMB, {}, SIZES, 0.03),
        (Adafactor, dict(beta1=0.9), SIZES, 0.02),
        (CAME, dict(lr=0.02), SIZES, 0.03),
        (AdEMAMix, {}, SIZES, 0.03),
    ],
    ids=named,
)
def test_8bit_state_follows_fp32(
    rule: type, options: dict[str, Any], sizes: list[tuple[int, ...]], error: float
) -> None:
    """Training with 8-bit state stays close to training with fp32 state, relative to the weights' change."""
    ours, exact = parameters(sizes), parameters(sizes)
    train(rule(ours, **options), ours, range(10))
    train(rule(exact, state_format="fp32", **options), exact, range(10))
    assert 0 < apart(ours, exact, parameters(sizes)) < error


def test_muon_reads_torchs_state_and_writes_it() -> None:
    theirs = parameters(MATRICES)
    b = torch.optim.Muon(theirs, lr=0.02)
    train(b, theirs, range(3))
    ours = [Parameter(p.detach().clone()) for p in theirs]
    a = Muon(ours, state_format="fp32")
    a.load_state_dict(b.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])
    back = [Parameter(p.detach().clone()) for p in ours]
    c = torch.optim.Muon(back)
    c.load_state_dict(a.torch_state_dict())
    start = [Parameter(p.detach().clone()) for p in ours]
    train(a, ours, range(3, 4))
    train(c, back, range(3, 4))
    assert apart(ours, back, start) < 5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adafactor_reads_torchs_state(dtype: torch.dtype) -> None:
    """Adafactor loads the state of torch.optim.Adafactor and converts bf16 statistics to fp32."""
    theirs = parameters(SIZES, dtype)
    b = torch.optim.Adafactor(theirs, lr=0.05, d=2.0, weight_decay=0.1)
    train(b, theirs, range(3))
    ours = [Parameter(p.detach().clone()) for p in theirs]
    a = Adafactor(ours)
    saved = copy.deepcopy(b.state_dict())
    a.load_state_dict(saved)
    group = a.param_groups[0]
    assert (group["lr"], group["d"], group["beta1"], group["state_format"]) == (0.05, 2.0, 0.0, "8bit")
    for p, q in zip(ours, theirs, strict=True):
        for name, value in b.state[q].items():
            assert torch.equal(a.state[p][name], value.float())
    if dtype == torch.float32:
        start = [Parameter(p.detach().clone()) for p in theirs]
        train(a, ours, range(3, 5))
        train(b, theirs, range(3, 5))
        assert apart(ours, theirs, start) < 1e-4
    mean = Adafactor(ours, beta1=0.9)
    with pytest.raises(
        ValueError, match=r"Adafactor: load_state_dict: expected the entries \['step', 'exp_avg'\]"
    ):
        mean.load_state_dict(saved)


@pytest.mark.device
@pytest.mark.parametrize("rule", [Adafactor, CAME], ids=named)
def test_what_is_loaded_is_copied_to_the_parameters(rule: type) -> None:
    a, b = (rule(parameters(SIZES)) for _ in range(2))
    train(a, a.param_groups[0]["params"], range(2))
    saved = a.state_dict()
    saved["state"] = {i: {name: t.cpu() for name, t in entry.items()} for i, entry in saved["state"].items()}
    before = copy.deepcopy(saved)
    b.load_state_dict(saved)
    train(b, b.param_groups[0]["params"], range(2, 4))
    for index, entry in before["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in entry.items())


def test_adafactor_with_a_tensor_as_lr() -> None:
    ours, theirs = parameters(SIZES), parameters(SIZES)
    lr = torch.tensor(0.05)
    a, b = Adafactor(ours, lr=lr), Adafactor(theirs, lr=0.05)
    train(a, ours, range(2))
    train(b, theirs, range(2))
    lr.fill_(0.01)
    b.param_groups[0]["lr"] = 0.01
    train(a, ours, range(2, 4))
    train(b, theirs, range(2, 4))
    assert apart(ours, theirs, parameters(SIZES)) < 1e-6


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adafactor_resumes_with_its_mean_or_without(beta1: float) -> None:
    through = parameters(SIZES)
    a = Adafactor(through, beta1=beta1)
    train(a, through, range(2))
    torch.save(a.state_dict(), file := io.BytesIO())
    resumed = [Parameter(p.detach().clone()) for p in through]
    b = Adafactor(resumed, beta1=beta1)
    b.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    train(a, through, range(2, 4))
    train(b, resumed, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(through, resumed, strict=True))
    # A state brings its options along, as in PyTorch.
    loaded = [Parameter(p.detach().clone()) for p in through]
    other = Adafactor(loaded, beta1=0.9 - beta1)
    other.load_state_dict(a.state_dict())
    train(a, through, range(4, 6))
    train(other, loaded, range(4, 6))
    assert all(torch.equal(p, q) for p, q in zip(through, loaded, strict=True))


def test_adafactor_has_a_mean_in_some_groups() -> None:
    """Each group has the state and the steps that its own beta1 asks for."""
    together = parameters(SIZES)
    alone = [Parameter(p.detach().clone()) for p in together]
    first, rest = together[:1], together[1:]
    a = Adafactor([{"params": first, "beta1": 0.9}, {"params": rest}], beta1=0.0)
    separate = [Adafactor(alone[:1], beta1=0.9), Adafactor(alone[1:])]
    for step in range(3):
        train(a, together, range(step, step + 1))
        for p, q in zip(together, alone, strict=True):
            q.grad = p.grad
        for optimizer in separate:
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))
    assert "exp_avg" in a.state[first[0]] and "exp_avg" not in a.state[rest[0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Muon(p), r"Muon: params\[1\]: expected a matrix, received shape \(300,\); use .*AdamW"),
        (lambda p: Muon(p[:1], momentum=1.0), "Muon: momentum: expected"),
        (
            lambda p: Muon(p[:1], ns_steps=0),
            "Muon: ns_steps: expected a whole number from 1 to 99, received 0",
        ),
        (lambda p: Muon(p[:1], ns_coefficients=(1.0,)), "Muon: ns_coefficients: expected 3 numbers"),
        (lambda p: Muon(p[:1], adjust_lr_fn="rms"), "Muon: adjust_lr_fn: expected None"),
        (lambda p: Muon(p[:1], eps=-1), "Muon: eps: expected"),
        (lambda p: Adafactor(p, beta2_decay=0.8), "Adafactor: beta2_decay: expected"),
        (lambda p: Adafactor(p, eps=(-1, 1)), "Adafactor: eps: expected"),
        (lambda p: Adafactor(p, d=0.5), "Adafactor: d: expected"),
        (lambda p: Adafactor(p, beta1=1.0), "Adafactor: beta1: expected a number in"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "LAMB: betas: expected two"),
        (lambda p: LAMB(p, weight_decay=-1), "LAMB: weight_decay: expected"),
        (lambda p: CAME(p, betas=(0.9, 0.9)), "CAME: betas: expected three numbers"),
        (
            lambda p: CAME(p, betas=(0.0, 0.9, 0.9)),
            "CAME: betas: expected a first number above 0, since the instability",
        ),
        (lambda p: CAME(p, betas=(0.9, 0.9, 1.0)), "CAME: betas: expected three numbers"),
        (lambda p: CAME(p, eps=(0.0, 1e-16)), "CAME: eps: expected two numbers above 0"),
        (lambda p: CAME(p, clip_threshold=0), "CAME: clip_threshold: expected a number above 0"),
        (lambda p: CAME(p, weight_decay=-1), "CAME: weight_decay: expected"),
        (lambda p: AdEMAMix(p, betas=(0.9, 0.9)), "AdEMAMix: betas: expected three"),
        (lambda p: AdEMAMix(p, alpha=-1), "AdEMAMix: alpha: expected"),
        (lambda p: AdEMAMix(p, t_alpha=0), "AdEMAMix: t_alpha: expected None or a number of steps"),
        (lambda p: AdEMAMix(p, betas=(0.9, 0.9, 0.5), t_beta3=5), "AdEMAMix: betas: expected a third"),
    ],
)
def test_bad_options(make: Callable[[list[Parameter]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters(SIZES))

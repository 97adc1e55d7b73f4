"""Tests of ScheduleFreeAdamW: the sequences x, y and z of the paper, train and eval modes, a training run."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoestring.optim import GaLore, ScheduleFreeAdamW

pytestmark = pytest.mark.device

SIZES = [(20, 13), (300,), (1,), (0,)]
STATES = pytest.mark.parametrize("state", ["8bit", "4bit", "bf16", "fp32"])
# "fp32" means fp32 weights. The other entries are values of the option `weights`, tested with bf16 weights.
KINDS = ("fp32", "nearest", "stochastic", "remainder")
WEIGHTS = pytest.mark.parametrize("weights", KINDS)


def parameters(weights: str = "fp32", sizes: list[tuple[int, ...]] = SIZES) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def made(params: list[Parameter], weights: str = "fp32", **options: Any) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(
        params, 0.05, weight_rounding="nearest" if weights == "fp32" else weights, **options
    )


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


class Paper:
    """A reference implementation in fp64: algorithm 1 of the Schedule-Free paper, which stores z and x."""

    def __init__(
        self, start: Tensor, betas: tuple[float, float], weight_decay: float, warmup_steps: int
    ) -> None:
        self.z, self.x, self.v = start.double(), start.double(), torch.zeros_like(start, dtype=torch.float64)
        self.betas, self.weight_decay, self.warmup_steps = betas, weight_decay, warmup_steps
        self.steps, self.sum = 0, 0.0

    @property
    def y(self) -> Tensor:
        return (1 - self.betas[0]) * self.z + self.betas[0] * self.x

    def step(self, grad: Tensor, lr: float) -> None:
        self.steps += 1
        rise = min(self.steps / self.warmup_steps, 1) if self.warmup_steps else 1.0
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * grad.double().square()
        root = (self.v / (1 - self.betas[1] ** self.steps)).sqrt() + 1e-8
        self.z = self.z - lr * rise * (grad.double() / root + self.weight_decay * self.y)
        self.sum += rise**2
        self.x = self.x + rise**2 / self.sum * (self.z - self.x)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 30])
@pytest.mark.parametrize("maximize", [False, True])
def test_is_the_paper(warmup_steps: int, maximize: bool) -> None:
    """y, z and x of ScheduleFreeAdamW follow the paper for twelve steps.

    The learning rate changes after eight steps.
    """
    betas, ours = (0.8, 0.95), parameters()
    optimizer = ScheduleFreeAdamW(
        ours, betas=betas, weight_decay=0.2, warmup_steps=warmup_steps, state_format="fp32", maximize=maximize
    )
    theirs = [Paper(p.detach(), betas, 0.2, warmup_steps) for p in ours]
    for step in range(12):
        lr = optimizer.param_groups[0]["lr"] = 0.1 if step < 8 else 0.03
        train(optimizer, ours, range(step, step + 1))
        for p, paper in zip(ours, theirs, strict=True):
            paper.step(-p.grad if maximize else p.grad, lr)
            torch.testing.assert_close(p.detach().double(), paper.y, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                p.detach() + optimizer.state[p]["offset"], paper.z.float(), rtol=1e-5, atol=1e-5
            )
    optimizer.eval()
    for p, paper in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().double(), paper.x, rtol=1e-5, atol=1e-5)


def test_a_skipped_step_does_not_count() -> None:
    """Skipped steps do not count in the average x. It runs over the steps that each parameter took.

    The test skips steps with found_inf. Some parameters get their first gradient late.
    """
    straight, skipping = parameters(), parameters()
    a, b = made(straight, warmup_steps=3), made(skipping, warmup_steps=3)
    train(a, straight, range(5))
    train(b, skipping, range(2))
    b.grad_scale, b.found_inf = torch.ones(()), torch.ones(())
    train(b, skipping, range(100, 103))
    del b.grad_scale, b.found_inf
    train(b, skipping, range(2, 5))
    late, c = parameters(), made(parameters(), warmup_steps=3)
    c = made(late, warmup_steps=3)
    train(c, late[:1], range(7))
    late[0].grad = None
    for p in late[1:]:
        p.grad = torch.ones_like(p)
    c.step()
    assert all(torch.equal(p, q) for p, q in zip(straight, skipping, strict=True))
    assert [c.state[p]["step"].item() for p in late] == [7, 1, 1, 1]
    # Parameters that took one step have equal x, y and z. So the optimizer state `offset`, from which eval()
    # computes x, is zero.
    assert all(entry["offset"].abs().sum() == 0 for entry in list(c.state.values())[1:])


@STATES
@WEIGHTS
def test_eval_and_train(state: str, weights: str) -> None:
    """eval() changes the weights to x = y - offset (1 - beta1) / beta1, and train() changes them back to y.

    The tensor `offset` is part of the optimizer state. After both changes, a weight differs by at most one
    unit in the last place. A second eval() or train() in a row changes nothing.
    """
    params = parameters(weights)
    optimizer = made(params, weights, state_format=state, betas=(0.8, 0.9))
    train(optimizer, params, range(6))
    y = [values(p, optimizer) for p in params]
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    assert all(torch.equal(a, values(p, optimizer)) for a, p in zip(y, params, strict=True))
    optimizer.eval()
    x = [values(p, optimizer) for p in params]
    optimizer.eval()
    assert all(torch.equal(a, values(p, optimizer)) for a, p in zip(x, params, strict=True))
    assert not torch.equal(x[0], y[0])
    for a, b, p in zip(x, y, params, strict=True):
        exact = b - optimizer.state[p]["offset"].float() * 0.25
        assert ((a - exact).abs() <= unit(exact, weights) * 0.51).all()
    optimizer.train()
    for a, b, p in zip(x, y, params, strict=True):
        assert ((values(p, optimizer) - b).abs() <= unit(torch.maximum(a.abs(), b.abs()), weights)).all()
    after = optimizer.state_dict()
    for entry, old in zip(after["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(entry[k], old[k]) for k in entry if k != "weight_remainder")
    assert after["param_groups"] == before["param_groups"]


def values(p: Parameter, optimizer: ScheduleFreeAdamW) -> Tensor:
    """Return each parameter's weights in fp32, combined with their remainder if they have one."""
    remainder = optimizer.state[p].get("weight_remainder")
    if remainder is None:
        return p.detach().float().clone()
    return ((p.detach().view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def unit(x: Tensor, weights: str) -> Tensor:
    """Return the unit in the last place of each element of x, in the precision of the stored weights."""
    mantissa = 23 if weights in ("fp32", "remainder") else 7
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - mantissa)


@STATES
@WEIGHTS
@pytest.mark.parametrize("in_eval", [False, True])
def test_bitwise_resume_in_both_modes(state: str, weights: str, in_eval: bool) -> None:
    through = parameters(weights)
    straight = made(through, weights, state_format=state, warmup_steps=4)
    train(straight, through, range(3))
    if in_eval:
        straight.eval()
    torch.save(straight.state_dict(), file := io.BytesIO())
    resumed = [Parameter(p.detach().clone()) for p in through]
    loaded = made(resumed, weights)
    loaded.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert [group["train_mode"] for group in loaded.param_groups] == [not in_eval]
    for optimizer, params in ((straight, through), (loaded, resumed)):
        optimizer.train()
        train(optimizer, params, range(3, 6))
        optimizer.eval()
    for p, q in zip(through, resumed, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(straight.state[p][name], loaded.state[q][name]) for name in straight.state[p])


def test_eval_mode_takes_no_steps() -> None:
    params = parameters()
    optimizer = made(params)
    train(optimizer, params, range(2))
    optimizer.eval()
    before = [p.detach().clone() for p in params]
    message = r"ScheduleFreeAdamW: step: expected train mode, received eval mode; call train\(\)"
    with pytest.raises(RuntimeError, match=message):
        train(optimizer, params, range(1))
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(lambda: pytest.fail("must not be called"))
    backward = made(parameters(), step_in_backward=True)
    backward.eval()
    with pytest.raises(RuntimeError, match=message):
        backward.param_groups[0]["params"][1].sum().backward()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.train()
    train(optimizer, params, range(2, 3))


@pytest.mark.parametrize("weights", KINDS)
def test_steps_in_backward_and_in_between(weights: str) -> None:
    """Steps within backward equal ordinary steps, also with calls of eval() and train() between two steps."""
    ours, theirs = parameters(weights), parameters(weights)
    a = made(ours, weights, step_in_backward=True)
    b = made(theirs, weights)
    for step in range(4):
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in ours]
        for optimizer, params in ((a, ours), (b, theirs)):
            if step == 2:
                optimizer.eval()
                optimizer.train()
            sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(betas=(0.0, 0.9)), "betas: expected a first number above 0, received 0"),
        (dict(betas=(0.9, 1.0)), r"betas: expected two numbers in \[0, 1\), received 0.9 and 1"),
        (dict(eps=-1.0), "eps: expected a number of at least 0"),
        (dict(weight_decay=-1.0), "weight_decay: expected a number of at least 0"),
        (dict(warmup_steps=-1), "warmup_steps: expected a whole number of at least 0, received -1"),
        (dict(warmup_steps=2.5), "warmup_steps: expected a whole number of at least 0, received 2.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"ScheduleFreeAdamW: {message}"):
        ScheduleFreeAdamW(parameters(), **options)


def test_other_bad_uses() -> None:
    with pytest.raises(ValueError, match="train_mode: expected True or False, received 1"):
        ScheduleFreeAdamW([{"params": parameters(), "train_mode": 1}])
    with pytest.raises(
        ValueError, match="base_optimizer: expected .* that do not project, nor average weights"
    ):
        GaLore(parameters(), ScheduleFreeAdamW)


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def learned(kind: type, **options: Any) -> tuple[float, float]:
    """Train a network on 300 small batches of noisy outputs of a teacher network.

    Returns:
        The network's mean squared differences from the teacher, in train mode and in eval mode.
    """
    teacher, net = network(seed=0), network(seed=1)
    optimizer = kind(net.parameters(), 1e-2, weight_decay=0.0, **options)
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    for _ in range(300):
        x, noise = torch.randn(32, 32, generator=generator), torch.randn(32, 4, generator=generator)
        optimizer.zero_grad()
        (net(x) - teacher(x).detach() - noise).square().mean().backward()
        optimizer.step()
    x, errors = torch.randn(2000, 32, generator=generator), []
    for switch in (lambda: None, getattr(optimizer, "eval", lambda: None)):
        switch()
        with torch.no_grad():
            errors.append((net(x) - teacher(x)).square().mean().item())
    return errors[0], errors[1]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test on one thread, because layers this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_learns_without_a_schedule(backend: str, one_thread: None) -> None:
    """The average x ends with a lower error than y and than AdamW with a constant learning rate.

    Low-precision state increases the error by at most 5 %.
    """
    if backend == "simt":
        pytest.skip("a training of thousands of launches takes the emulator minutes")
    constant = learned(torch.optim.AdamW)[1]
    exact = learned(ScheduleFreeAdamW, state_format="fp32", warmup_steps=20)
    assert exact[1] < exact[0] and exact[1] < 0.7 * constant
    for state, margin in (("bf16", 1.01), ("8bit", 1.02), ("4bit", 1.05)):
        error = learned(ScheduleFreeAdamW, state_format=state, warmup_steps=20)[1]
        print(f"{state}: {error:.4f}, fp32: {exact[1]:.4f}, AdamW: {constant:.4f}")
        assert error < margin * exact[1]

"""Tests of shoestring.optim.SAM against its definition in fp64, and that it restores the weights exactly."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from relative_error import relative_error
from shoestring.optim import SAM, SGD, AdamW, GaLore, Lion

X = (64, 12)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return [
        Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((12, 20), (20,), (20, 1))
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    x = torch.randn(X, generator=generator)
    return x, torch.randn(len(x), 1, generator=generator)


def loss_of(params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    w, b, v = (p.to(x.dtype) for p in params)
    return ((x @ w + b).tanh() @ v - y).square().mean()


def half(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    (loss_of(params, *batch(step)) * scale).backward()


def train(opt: SAM, params: list[Parameter], steps: range) -> None:
    for step in steps:
        half(params, step)
        opt.first_step(zero_grad=True)
        half(params, step)
        opt.second_step(zero_grad=True)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def gradients(values: list[Tensor], step: int) -> list[Tensor]:
    leaves = [v.detach().clone().requires_grad_() for v in values]
    x, y = batch(step)
    return list(torch.autograd.grad(loss_of(leaves, x.double(), y.double()), leaves))


@pytest.mark.device
@pytest.mark.parametrize("adaptive", [False, True])
def test_follows_fp64(adaptive: bool) -> None:
    """SAM over SGD with momentum follows its definition in fp64.

    One parameter has a different rho.
    """
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "rho": 0.4}]
    opt = SAM(groups, SGD, rho=0.2, adaptive=adaptive, lr=0.05, momentum=0.8, state_format="fp32")
    exact, momentum = [p.detach().double() for p in params], [0.0] * 3
    for step in range(6):
        first = gradients(exact, step)
        norm = torch.stack(
            [(g * (p if adaptive else 1)).norm() for p, g in zip(exact, first, strict=True)]
        ).norm()
        up = [
            r * g * (p * p if adaptive else 1) / norm
            for p, g, r in zip(exact, first, (0.2, 0.2, 0.4), strict=True)
        ]
        second = gradients([p + u for p, u in zip(exact, up, strict=True)], step)
        momentum = [0.8 * m + g for m, g in zip(momentum, second, strict=True)]
        exact = [p - 0.05 * m for p, m in zip(exact, momentum, strict=True)]

        half(params, step)
        opt.first_step(zero_grad=True)
        if step == 0:
            assert all(
                relative_error(p - q, u) < 1e-4 for p, q, u in zip(params, parameters(), up, strict=True)
            )
        half(params, step)
        opt.second_step(zero_grad=True)
    for p, e in zip(params, exact, strict=True):
        assert relative_error(p, e) < 1e-5


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adaptive", [False, True])
def test_weights_come_back_to_the_bit(dtype: torch.dtype, adaptive: bool) -> None:
    """With a learning rate of 0, the second half of a SAM step restores the weights exactly.

    A parameter without a gradient is not perturbed.
    """
    params = parameters(dtype)
    before = [p.detach().clone() for p in params]
    places = [p.data_ptr() for p in params]
    opt = SAM(params, torch.optim.SGD, rho=0.3, adaptive=adaptive, lr=0.0)
    for step in range(3):
        half(params, step)
        params[1].grad = None
        opt.first_step(zero_grad=True)
        assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])
        assert all(p.grad is None for p in params)
        half(params, step)
        opt.second_step()
        assert same(params, before) and [p.data_ptr() for p in params] == places
        opt.zero_grad()
    assert opt._weights is None  # SAM has freed its copies of the weights


@pytest.mark.device
@pytest.mark.parametrize("base", [AdamW, Lion, torch.optim.AdamW], ids=["AdamW", "Lion", "torch.AdamW"])
def test_micro_batches_add_up_in_both_halves(base: type) -> None:
    whole, parts = parameters(), parameters()
    a, b = (SAM(p, base, rho=0.2, lr=1e-3) for p in (whole, parts))
    for step in range(3):
        for part in range(2):
            half(whole, step)
            x, y = batch(step)
            for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
                (loss_of(parts, xs, ys) / 4).backward()
            for opt in (a, b):
                (opt.first_step, opt.second_step)[part](zero_grad=True)
        if base is not Lion:  # Lion's updates are signs, which a rounding error can change.
            assert all(relative_error(p, q) < 1e-4 for p, q in zip(parts, whole, strict=True))
    assert all(relative_error(p, q) < 1e-2 for p, q in zip(parts, whole, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(whole, parameters(), strict=True))


@pytest.mark.device
def test_a_closure_is_called_twice() -> None:
    ours, theirs = parameters(), parameters()
    a, b = (SAM(p, AdamW, rho=0.2, lr=1e-2) for p in (ours, theirs))
    for step in range(3):
        calls = []

        # The closure does not call zero_grad(), so SAM's step() must clear the gradients between its two
        # halves.
        def closure() -> Tensor:
            loss = loss_of(ours, *batch(step))
            loss.backward()
            calls.append(loss.item())
            return loss

        a.zero_grad()
        loss = a.step(closure)
        train(b, theirs, range(step, step + 1))
        assert len(calls) == 2 and loss.item() == calls[0] < calls[1]
    assert same(ours, theirs)

    before = [p.detach().clone() for p in ours]
    calls = []

    def fails_up_there() -> Tensor:
        if calls:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        a.step(fails_up_there)
    assert same(ours, before)
    a.state_dict()  # SAM is not between two halves of a step, where state_dict() would raise an error.


@pytest.mark.device
@pytest.mark.parametrize("base", [AdamW, torch.optim.AdamW, GaLore], ids=["AdamW", "torch.AdamW", "GaLore"])
@pytest.mark.parametrize("bad", [None, 1, 2], ids=["finite", "first", "second"])
def test_grad_scaler_skips_both_halves(base: type, bad: int | None) -> None:
    """A GradScaler does not change the steps of SAM, except that steps with inf or NaN are skipped."""
    options = {"rank": 8} if base is GaLore else {}
    ours, theirs = parameters(), parameters()
    a, b = (SAM(p, base, rho=0.2, lr=1e-2, **options) for p in (ours, theirs))
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**12, growth_interval=100)
    for step in range(4):
        before = [p.detach().clone() for p in ours]
        spoiled = bad is not None and step == 2
        scaler.scale(loss_of(ours, *batch(step))).backward()
        if spoiled and bad == 1:
            ours[0].grad[0, 0] = torch.inf
        a.first_step(zero_grad=True)
        assert same(ours, before) == (spoiled and bad == 1)
        scaler.scale(loss_of(ours, *batch(step))).backward()
        if spoiled and bad == 2:
            ours[2].grad[0, 0] = torch.nan
        scaler.step(a)
        scaler.update()
        a.zero_grad()
        if spoiled:
            assert same(ours, before)
        else:
            train(b, theirs, range(step, step + 1))
    assert scaler.get_scale() == (2**11 if bad == 2 else 2**12)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert not hasattr(a.base_optimizer, "grad_scale")


@pytest.mark.device
def test_fp16_weights_under_a_scaler() -> None:
    """SAM with a GradScaler steps fp16 weights whose scaled gradient norm exceeds the range of fp16.

    A base optimizer that does not unscale within its step raises an error.
    """
    ours, theirs = parameters(torch.float16), parameters(torch.float16)
    a, b = SAM(ours, AdamW, rho=0.5, lr=1e-2), SAM(ours, torch.optim.AdamW, rho=0.5)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**13)
    twin = SAM(theirs, AdamW, rho=0.5, lr=1e-2)
    for step in range(3):
        scaler.scale(loss_of(ours, *batch(step))).backward()
        a.first_step(zero_grad=True)
        scaler.scale(loss_of(ours, *batch(step))).backward()
        scaler.step(a)
        scaler.update()
        a.zero_grad()
        train(twin, theirs, range(step, step + 1))
    print(scaler.get_scale(), [relative_error(p, q) for p, q in zip(ours, theirs, strict=True)])
    assert all(relative_error(p, q) < 2e-3 for p, q in zip(ours, theirs, strict=True))
    before = [p.detach().clone() for p in ours]
    scaler.scale(loss_of(ours, *batch(0))).backward()
    b.first_step()
    with pytest.raises(ValueError, match="SAM: grad: expected fp32 or bf16 gradients to unscale, received"):
        scaler.step(b)
    assert same(ours, before)


@pytest.mark.device
def test_rho_of_zero_is_the_base_optimizer() -> None:
    ours, theirs = parameters(), parameters()
    a, b = SAM(ours, AdamW, rho=0.0, lr=1e-2, max_grad_norm=0.1), AdamW(theirs, lr=1e-2, max_grad_norm=0.1)
    for step in range(3):
        train(a, ours, range(step, step + 1))
        half(theirs, step)
        b.step()
        b.zero_grad()
    assert same(ours, theirs) and a.base_optimizer.grad_norm > 0.1


@pytest.mark.device
def test_finds_a_flatter_minimum() -> None:
    """Training with SAM ends where the largest curvature of the loss is smaller than without SAM."""
    x, y = (t.double() for t in batch(0))

    def loss_at(flat: Tensor) -> Tensor:
        w, b, v = flat.split([240, 20, 20])
        return loss_of([w.view(12, 20), b, v.view(20, 1)], x, y)

    curvatures = []
    for rho in (0.0, 0.4):
        params = parameters()
        opt = SAM(params, torch.optim.SGD, rho=rho, lr=0.05)
        for _ in range(300):
            train(opt, params, range(1))
        flat = torch.cat([p.detach().flatten() for p in params]).double()
        curvatures.append(torch.linalg.eigvalsh(torch.func.hessian(loss_at)(flat))[-1].item())
    print(f"largest curvature: {curvatures}")
    assert 0 < curvatures[1] < 0.8 * curvatures[0]


@pytest.mark.device
@pytest.mark.parametrize("base", [AdamW, torch.optim.AdamW, GaLore], ids=["AdamW", "torch.AdamW", "GaLore"])
def test_bitwise_resume(base: type) -> None:
    through = parameters()
    opt = SAM([{"params": through[:1], "rho": 0.5}, {"params": through[1:]}], base, rho=0.2, lr=1e-2)
    train(opt, through, range(3))
    before = [p.detach().clone() for p in through]
    torch.save(opt.state_dict(), file := io.BytesIO())
    resumed = [Parameter(p.clone()) for p in before]
    other = SAM([{"params": resumed[:1]}, {"params": resumed[1:]}], base)
    seen = []
    other.register_load_state_dict_pre_hook(lambda o, s: seen.append((o, len(s["state"]))))
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert seen == [(other, 3)] and [g["rho"] for g in other.param_groups] == [0.5, 0.2]
    copies = []
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        copies.append((again, [p for g in again.param_groups for p in g["params"]]))
    train(opt, through, range(3, 6))
    train(other, resumed, range(3, 6))
    assert same(through, resumed)
    for again, params in copies:
        train(again, params, range(3, 6))
        assert same(through, params)


@pytest.mark.device
def test_schedulers_groups_and_base_are_one() -> None:
    params = parameters()
    opt = SAM(params[:2], AdamW, rho=0.1, lr=1e-2)
    schedule, calls = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch), []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    train(opt, params, range(1))
    assert len(calls) == 1
    schedule.step()
    opt.add_param_group({"params": params[2:], "rho": 0.3, "state_format": "fp32"})
    assert opt.base_optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    assert [g["rho"] for g in opt.base_optimizer.param_groups] == [0.1, 0.3]
    train(opt, params, range(1, 3))
    assert opt.state[params[2]]["exp_avg"].dtype == torch.float32 and opt.state[params[2]]["step"] == 2


@pytest.mark.device
def test_infinite_gradients_without_a_scaler_do_not_move_up() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    opt = SAM(params, torch.optim.SGD, lr=0.0)
    half(params, 0)
    params[0].grad[0, 0] = torch.nan
    opt.first_step(zero_grad=True)
    assert same(params, before)
    half(params, 0)
    opt.second_step()


def test_what_is_not_due_is_refused() -> None:
    params = parameters()
    opt = SAM(params, AdamW)
    half(params, 0)
    for call in (opt.step, opt.second_step):
        with pytest.raises(RuntimeError, match="SAM: step: expected first_step\\(\\) before, or a closure"):
            call()
    opt.first_step()
    with pytest.raises(RuntimeError, match="SAM: first_step: expected second_step\\(\\) after"):
        opt.first_step()
    with pytest.raises(RuntimeError, match="SAM: step: expected second_step\\(\\)"):
        opt.step(lambda: None)
    for call in (opt.state_dict, lambda: opt.load_state_dict({}), lambda: copy.deepcopy(opt)):
        with pytest.raises(RuntimeError, match="expected second_step\\(\\) after first_step\\(\\), received"):
            call()
    opt.second_step()
    for rho in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="SAM: rho: expected a number of at least 0"):
            SAM(params, AdamW, rho=rho)
        with pytest.raises(ValueError, match="SAM: rho: expected a number of at least 0"):
            opt.add_param_group({"params": parameters(), "rho": rho})
    with pytest.raises(ValueError, match="SAM: base_optimizer: expected a class of optimizers"):
        SAM(params, AdamW(params))
    with pytest.raises(ValueError, match="AdamW: lr: expected"):
        SAM(params, AdamW, lr=-1)
    with pytest.raises(ValueError, match="SAM: step_in_backward: expected False"):
        SAM(params, AdamW, step_in_backward=True)
    with pytest.raises(TypeError, match="nesterov"):
        SAM(params, AdamW, nesterov=True)


def take(opt: SAM, params: list[Parameter], step: int) -> bool:
    """Take one step as the documentation of ``interval`` does, and return whether the weights have moved."""
    half(params, step)
    moved = opt.first_step(zero_grad=True)
    if moved:
        half(params, step)
    opt.second_step(zero_grad=True)
    return moved


@pytest.mark.device
@pytest.mark.parametrize("base", [AdamW, torch.optim.AdamW, GaLore], ids=["AdamW", "torch.AdamW", "GaLore"])
def test_interval(base: type) -> None:
    """Every third step is SAM's, all others are the base optimizer's, also after a resume."""
    options = {"rank": 8} if base is GaLore else {}
    ours, theirs = parameters(), parameters()
    a = SAM(ours, base, rho=0.2, interval=3, lr=1e-2, **options)
    b = SAM(theirs, base, rho=0.2, lr=1e-2, **options)
    for step in range(5):
        assert take(a, ours, step) == (step % 3 == 0)
        if step % 3 == 0:
            take(b, theirs, step)
        else:
            half(theirs, step)
            b.base_optimizer.step()
            b.zero_grad()
        assert same(ours, theirs)
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    resumed = [Parameter(p.detach().clone()) for p in ours]
    other = SAM(resumed, base, rho=0.7, lr=1.0, **options)
    other.load_state_dict(torch.load(file, weights_only=True))
    for step in range(5, 8):
        assert take(other, resumed, step) == take(a, ours, step) == (step == 6)
    assert same(ours, resumed)


@pytest.mark.device
def test_interval_with_closures_and_a_scaler() -> None:
    ours = parameters()
    opt = SAM(ours, AdamW, rho=0.2, interval=2, lr=1e-2)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        opt.zero_grad()
        loss = loss_of(ours, *batch(len(calls)))
        loss.backward()
        return loss

    for _ in range(4):
        assert opt.step(closure).item() > 0
    assert len(calls) == 6

    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**10)
    scaled, plain = parameters(), parameters()
    a, b = (SAM(p, AdamW, rho=0.2, interval=2, lr=1e-2) for p in (scaled, plain))
    for step in range(4):
        scaler.scale(loss_of(scaled, *batch(step))).backward()
        if a.first_step(zero_grad=True):
            scaler.scale(loss_of(scaled, *batch(step))).backward()
        scaler.step(a)
        scaler.update()
        a.zero_grad()
        take(b, plain, step)
    for p, q in zip(scaled, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.device
def test_interval_of_groups_added_later() -> None:
    params = parameters()
    opt = SAM(params[:1], AdamW, interval=4, lr=1e-2)
    params[0].grad = torch.ones_like(params[0])
    opt.first_step()
    opt.second_step()
    opt.add_param_group({"params": params[1:], "rho": 0.3})
    assert [(g["interval"], g["sam_steps"]) for g in opt.param_groups] == [(4, 1), (4, 1)]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(
            ValueError, match="SAM: interval: expected a whole number of at least 1, received"
        ):
            SAM(params, AdamW, interval=wrong)

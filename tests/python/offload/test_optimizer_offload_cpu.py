"""Tests of offload="cpu": gradients are copied to the host, and the CPU steps while backward runs."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload_faults import disturb_offload
from operator_faults import replaced
from shoestring.optim import SGD, AdamW, Muon, ScheduleFreeAdamW
from shoestring.optim.base import LowMemoryOptimizer


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    yield
    disturb_offload()


def slow(microseconds: int) -> None:
    """Delay every copy between device and host by a random time of at most ``microseconds``."""
    disturb_offload(microseconds)


def model_of(dtype: torch.dtype = torch.float32, width: int = 1500) -> nn.Sequential:
    """Return four linear layers and a LayerNorm. Each matrix fills a bucket (9 MB in fp32).

    The weights of two layers are one tied parameter, and one bias is frozen.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=i != 1) for i in range(4)]
    layers.insert(2, nn.LayerNorm(width))
    model = nn.Sequential(*layers).to(dtype)
    model[4].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    return model


def batch_of(step: int, dtype: torch.dtype = torch.float32, width: int = 1500) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(dtype)


def expect_same(a: nn.Module, b: nn.Module, opt_a: LowMemoryOptimizer, opt_b: LowMemoryOptimizer) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
        for entry, value in opt_a.state[p].items() if p in opt_a.state else ():
            assert torch.equal(value, opt_b.state[q][entry]), f"{entry} of {name}"


@pytest.mark.parametrize("weights", ["nearest", "remainder"])
@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["", "in backward"])
@pytest.mark.sample(4)
def test_fifty_steps(in_backward: bool, state: str, weights: str) -> None:
    """Fifty steps with offload="cpu" give the same results bit for bit as without offload.

    The run has four micro-batches per step, clipping, a schedule, tied and frozen parameters, and delays.
    """
    results = []
    for offload in (None, "cpu"):
        model = model_of(torch.bfloat16, 300)
        opt = AdamW(
            model.parameters(),
            lr=1e-2,
            state_format=state,
            weight_rounding=weights,
            max_grad_norm=0.1,
            offload=offload,
            step_in_backward=in_backward and offload is not None,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        slow(200)
        norms = []
        for step in range(50):
            for micro in range(4):
                loss = model(batch_of(4 * step + micro, torch.bfloat16, 300)).float().square().mean() / 4
                if micro < 3:
                    with opt.accumulate():
                        loss.backward()
                else:
                    loss.backward()
                assert not opt.step_in_backward or all(p.grad is None for p in model.parameters())
            opt.step()
            schedule.step()
            opt.zero_grad()
            assert opt.grad_norm is not None
            norms.append(opt.grad_norm.item())
        results.append((model, opt, norms))
    (a, opt_a, norms_a), (b, opt_b, norms_b) = results
    expect_same(a, b, opt_a, opt_b)
    assert norms_a == norms_b and max(norms_a) > 0.1


class Stamp(torch.autograd.Function):
    """An identity function whose backward calls ``wait`` and then records the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: list[float], wait: Callable[[], None]) -> Tensor:
        ctx.times, ctx.wait = times, wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.wait()
        ctx.times.append(time.perf_counter())
        return grad, None, None


def test_buckets_are_stepped_before_backward_ends() -> None:
    """With offload="cpu" and step_in_backward, parameters are stepped before backward has ended.

    In the test, backward does not compute the gradient of the first layer until all other layers are stepped.
    """
    steps: list[float] = []

    def timed(call: Callable[[], None]) -> None:
        call()
        steps.append(time.perf_counter())

    def wait() -> None:
        for _ in range(2000):
            if len(steps) == len(layers) - 1:
                return
            time.sleep(0.01)

    layers = nn.ModuleList(nn.Linear(1500, 1500, bias=False) for _ in range(6))
    opt = AdamW(layers.parameters(), offload="cpu", step_in_backward=True)
    for _ in range(2):
        steps.clear()
        stamps: list[float] = []
        x = batch_of(0).requires_grad_()
        for i, layer in enumerate(layers):
            x = Stamp.apply(layer(x), stamps, wait if i == 0 else lambda: None)
        with replaced("adamw_", timed):
            x.square().mean().backward()
            ended = time.perf_counter()
            opt.step()
        assert len(steps) == len(layers)
        assert max(steps[:-1]) < stamps[-1] < ended, f"steps ended at {steps}, backward came by at {stamps}"


def test_gradients_are_freed_before_they_are_stepped() -> None:
    """offload="cpu" frees a gradient after its copy to the host, even if the CPU has not stepped yet."""
    go = threading.Event()

    def late(call: Callable[[], None]) -> None:
        go.wait(60)
        call()

    layers = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(4)))
    grads: list[StorageWeakRef] = []
    for layer in layers:  # the test's hooks are registered before the optimizer's hooks, so they run first
        layer.weight.register_post_accumulate_grad_hook(
            lambda p: grads.append(StorageWeakRef(p.grad.untyped_storage()))
        )
    opt = AdamW(layers.parameters(), offload="cpu", step_in_backward=True)
    with replaced("adamw_", late):
        layers(batch_of(0)).square().mean().backward()
        for _ in range(2000):
            if all(grad.expired() for grad in grads):
                break
            time.sleep(0.01)
        alive = sum(not grad.expired() for grad in grads)
        go.set()
        opt.step()
    assert len(grads) == 4 and alive == 0


def test_exact_clipping_is_by_the_norm_of_this_step() -> None:
    """offload="cpu" with step_in_backward clips by the norm of the current gradients.

    Without offload, step_in_backward clips by the norm of the previous step.
    """
    model = model_of(width=100)
    opt = SGD(
        model.parameters(),
        lr=1.0,
        state_format="fp32",
        offload="cpu",
        step_in_backward=True,
        max_grad_norm=1e-3,
    )
    before = [p.detach().clone() for p in model.parameters()]
    model(batch_of(0, width=100)).square().mean().backward()
    opt.step()
    moved = torch.linalg.vector_norm(
        torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before)])
    )
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)
    assert opt.grad_norm is not None and opt.grad_norm > 1e-2


@pytest.mark.parametrize("how", ["in place", "load_state_dict", "set_", "schedule-free"])
def test_changes_between_steps_are_seen(how: str) -> None:
    results = []
    for offload in (None, "cpu"):
        model = model_of(torch.bfloat16, 100)
        rule = ScheduleFreeAdamW if how == "schedule-free" else AdamW
        opt = rule(model.parameters(), lr=1e-2, weight_rounding="remainder", offload=offload)
        for step in range(4):
            model(batch_of(step, torch.bfloat16, 100)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            if how == "in place":
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            elif how == "load_state_dict":
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            elif how == "set_":
                model[1].weight.data = -model[1].weight.data
            else:
                opt.eval()
                opt.train()
        results.append((model, opt))
    expect_same(results[0][0], results[1][0], results[0][1], results[1][1])


@pytest.mark.parametrize("offload", ["cpu", "stream", None])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_second_backward_needs_a_step(clip: float | None, offload: str | None) -> None:
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    opt = AdamW(params, offload=offload, step_in_backward=True, max_grad_norm=clip)
    loss = lambda: sum((2 * p).sum() for p in params)  # noqa: E731
    with opt.accumulate():
        loss().backward()
        loss().backward()
    loss().backward()
    with pytest.raises(
        RuntimeError, match=r"AdamW: step_in_backward: expected step\(\) after each backward, received a sec"
    ):
        loss().backward()
    params[0].grad = params[1].grad = None
    opt.step()
    loss().backward()
    opt.step()
    assert all(opt.state[p]["step"] == 2 for p in params)


def test_an_error_in_the_worker_reaches_step() -> None:
    model = model_of(width=100)
    opt = AdamW(model.parameters(), offload="cpu", step_in_backward=True)

    def broken(call: Callable[[], None]) -> None:
        raise RuntimeError("adamw_: cannot")

    with replaced("adamw_", broken):
        model(batch_of(0, width=100)).square().mean().backward()
        with pytest.raises(RuntimeError, match="adamw_: cannot"):
            opt.step()
    model(batch_of(0, width=100)).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("scale", [2.0**10, 2.0**127], ids=["finite", "infinite"])
def test_with_a_grad_scaler(scale: float) -> None:
    results = []
    for offload in (None, "cpu"):
        model = model_of(width=100)
        opt = AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1, offload=offload)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            scaler.scale(model(batch_of(step, width=100)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        results.append((model, opt))
    expect_same(results[0][0], results[1][0], results[0][1], results[1][1])


def test_copies_and_checkpoints_between_backward_and_step() -> None:
    """deepcopy and state_dict() wait for optimizer steps that backward has started."""
    slow(2000)
    model = model_of(width=400)
    opt = Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2, offload="cpu", step_in_backward=True)
    model(batch_of(0, width=400)).square().mean().backward()
    state = copy.deepcopy(opt.state_dict()["state"])
    assert all(entry["step"] == 1 for entry in state.values()) and len(state) == 3
    opt.step()
    for index, p in enumerate(p for p in model.parameters() if p.dim() == 2):
        assert torch.equal(opt.state[p]["momentum_buffer"], state[index]["momentum_buffer"])
    twin = copy.deepcopy(opt)
    assert twin.offload == "cpu" and twin.step_in_backward


def test_gradients_without_backward() -> None:
    """offload="cpu" steps gradients that are set by hand, some for the first time in a later step."""
    results = []
    for offload in (None, "cpu"):
        params = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(()))]
        opt = AdamW(params, lr=0.1, offload=offload, step_in_backward=offload is not None)
        for step in range(3):
            for p in params[: step + 1]:
                p.grad = torch.full_like(p, 0.5)
            opt.step()
            opt.zero_grad()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)

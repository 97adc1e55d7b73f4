"""Tests of optimizers with schedulers, hooks, averaged weights and GradScaler of PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

from shoestring.optim import SGD, AdamW, Lion
from small_model import assert_equal, loss_of, model

Scheduler = lr_scheduler.LRScheduler

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


# ---- schedulers --------------------------------------------------------------------------------------------


def test_every_scheduler_of_torch_is_here() -> None:
    found = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    # Check PyTorch 2.11 only, since newer versions may have more schedulers.
    if torch.__version__.startswith("2.11."):
        assert found <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "tensor"])
def test_scheduler(name: str, kind: str) -> None:
    if kind == "SGD":
        options, (ours, theirs) = dict(lr=1e-2, momentum=0.9), (SGD, torch.optim.SGD)
    else:
        options, (ours, theirs) = dict(lr=1e-2), (AdamW, torch.optim.AdamW)
    nets = model(), model()
    lrs = [options["lr"] if kind != "tensor" else torch.tensor(1e-2) for _ in nets]
    a = ours(nets[0].parameters(), **options | dict(lr=lrs[0]), state_format="fp32")
    b = theirs(nets[1].parameters(), **options | dict(lr=lrs[1]))
    schedules = [SCHEDULERS[name](o) for o in (a, b)]
    for step in range(6):
        for net, opt in zip(nets, (a, b), strict=True):
            opt.zero_grad()
            loss_of(net, step).backward()
            opt.step()
        for schedule in schedules if step < 5 else []:
            schedule.step(*[1.0] if name == "ReduceLROnPlateau" else [])
        for key in ("lr", "betas", "momentum"):
            if key in b.param_groups[0]:
                mine, other = (torch.as_tensor(o.param_groups[0][key]) for o in (a, b))
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)
    # Make sure that the scheduler has changed the learning rate.
    assert float(a.param_groups[0]["lr"]) != 1e-2
    assert_equal(*nets, rtol=1e-5, atol=1e-6)
    schedules[0].load_state_dict(copy.deepcopy(schedules[0].state_dict()))


# ---- hooks -------------------------------------------------------------------------------------------------


def test_step_hooks_see_and_change_arguments() -> None:
    net = model()
    opt = AdamW(net.parameters())
    calls: list[str] = []

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        assert optimizer is opt
        calls.append("before")
        return args, {"closure": lambda: calls.append("closure")}

    handles = [
        opt.register_step_pre_hook(before),
        opt.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    loss_of(net, 0).backward()
    opt.step()
    assert calls == ["before", "closure", "after"]
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(calls) == 3
    with torch.profiler.profile() as profile:
        opt.step()
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_state_dict_hooks() -> None:
    net = model()
    opt = AdamW(net.parameters())
    loss_of(net, 0).backward()
    opt.step()
    order: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: order.append("pre"))

    def named(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order.append("post")
        return state | {"note": "kept"}

    def unnamed(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order.append("load pre")
        assert state.pop("note") == "kept"
        return state

    opt.register_state_dict_post_hook(named)
    opt.register_load_state_dict_pre_hook(unnamed)
    opt.register_load_state_dict_post_hook(lambda o: order.append("load post"))
    state = opt.state_dict()
    assert state["note"] == "kept" and state["format_version"] == 1
    opt.load_state_dict(state)
    assert order == ["pre", "post", "load pre", "load post"]


def test_named_parameters_and_their_names() -> None:
    nets = model(), model()
    opts = [AdamW(net.named_parameters()) for net in nets]
    loss_of(nets[0], 0).backward()
    opts[0].step()
    state = opts[0].state_dict()
    assert state["param_groups"][0]["param_names"] == [name for name, _ in nets[0].named_parameters()]
    opts[1].load_state_dict(state)
    assert opts[1].param_groups[0]["param_names"] == state["param_groups"][0]["param_names"]


# ---- averages of weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averaged_model(average: str) -> None:
    nets = model(), model()
    opts = (
        AdamW(nets[0].parameters(), lr=1e-2, state_format="fp32"),
        torch.optim.AdamW(nets[1].parameters(), lr=1e-2),
    )
    averages = []
    for net, opt in zip(nets, opts, strict=True):
        rule = dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)) if average == "ema" else {}
        mean = swa_utils.AveragedModel(net, **rule)
        schedule = swa_utils.SWALR(opt, swa_lr=1e-3, anneal_epochs=2)
        for step in range(4):
            opt.zero_grad()
            loss_of(net, step).backward()
            opt.step()
            mean.update_parameters(net)
            schedule.step()
        averages.append(mean)
    assert_equal(averages[0].module, averages[1].module, rtol=1e-5, atol=1e-6)
    assert any(
        not torch.equal(p, q)
        for p, q in zip(averages[0].module.parameters(), nets[0].parameters(), strict=True)
    )


# ---- GradScaler, closures ----------------------------------------------------------------------------------


def test_grad_scaler_after_unscale_and_with_a_tensor_of_lr() -> None:
    nets = model(), model()
    opts = Lion(nets[0].parameters(), lr=torch.tensor(1e-3)), Lion(nets[1].parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        for net, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
            if opt is opts[0]:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
            scaler.step(opt)
        scaler.update()
    assert_equal(*nets, rtol=1e-6, atol=1e-7)

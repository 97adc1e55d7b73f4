"""Tests of what a Python optimizer tells its C++ core: options, parameters and their replacement."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from operator_faults import replaced
from shoestring.optim import SGD, AdamW, Muon, ScheduleFreeAdamW
from shoestring.optim.base import LowMemoryOptimizer


def stepped(opt: LowMemoryOptimizer, params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    opt.step()
    return [p.detach().clone() for p in params]


def params_of(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.3),
        ("lr", torch.tensor(0.3)),
        ("betas", (0.5, 0.6)),
        ("betas", [0.5, 0.6]),
        ("eps", 1e-2),
        ("weight_decay", 1),
        ("maximize", True),
    ],
    ids=str,
)
def test_a_changed_option_counts_from_the_next_step(name: str, value: Any) -> None:
    a, b = params_of(300), params_of(300)
    changed, made = AdamW(a, state_format="fp32"), AdamW(b, state_format="fp32", **{name: value})
    changed.param_groups[0][name] = value
    for step in range(3):
        assert torch.equal(stepped(changed, a, step)[0], stepped(made, b, step)[0])


def test_an_option_that_is_changed_in_place_counts() -> None:
    a, b = params_of(300), params_of(300)
    betas, lr = [0.9, 0.99], torch.tensor(0.1)
    opt, other = AdamW(a, lr=lr, betas=betas), AdamW(b, lr=0.1, betas=(0.9, 0.99))  # type: ignore[arg-type]
    assert torch.equal(stepped(opt, a, 0)[0], stepped(other, b, 0)[0])
    betas[0] = 0.2
    lr.fill_(0.5)
    other.param_groups[0].update(betas=(0.2, 0.99), lr=0.5)
    assert torch.equal(stepped(opt, a, 1)[0], stepped(other, b, 1)[0])


def test_an_option_out_of_range_stops_the_step() -> None:
    params = params_of(300)
    opt = AdamW(params)
    before = stepped(opt, params, 0)
    opt.param_groups[0]["betas"] = (0.9, 1.5)
    with pytest.raises(ValueError, match=r"AdamW: betas: expected two numbers in \[0, 1\)"):
        stepped(opt, params, 1)
    assert torch.equal(params[0], before[0]) and opt.state[params[0]]["step"] == 1
    opt.param_groups[0]["betas"] = (0.9, 0.999)
    stepped(opt, params, 1)
    assert opt.state[params[0]]["step"] == 2


def test_a_group_that_gets_and_loses_parameters() -> None:
    """A parameter keeps its state while other parameters enter and leave the list of its group."""
    a, b = params_of(300, 40), params_of(300, 40)
    opt, other = SGD(a, lr=0.1), SGD(b, lr=0.1)
    late = nn.Parameter(torch.ones(20))
    for step in range(3):
        if step == 1:
            opt.param_groups[0]["params"].append(late)
        assert all(map(torch.equal, stepped(opt, a, step), stepped(other, b, step)))
    late.grad = torch.ones(20)
    stepped(opt, a, 3), stepped(other, b, 3)
    assert late.max() < 1 and opt.state[late]["step"] == 1
    assert opt.param_groups[0]["params"].pop() is late
    assert all(map(torch.equal, stepped(opt, a, 4), stepped(other, b, 4)))


def test_a_parameter_that_is_replaced_keeps_its_state() -> None:
    a, b = params_of(300, 40), params_of(300, 40)
    opt, other = AdamW(a), AdamW(b)
    stepped(opt, a, 0), stepped(other, b, 0)
    a[0] = opt.param_groups[0]["params"][0] = nn.Parameter(a[0].detach().clone())
    assert all(map(torch.equal, stepped(opt, a, 1), stepped(other, b, 1)))


def test_each_class_reaches_its_core() -> None:
    matrix = nn.Parameter(torch.ones(4, 4))
    muon, free = Muon([matrix]), ScheduleFreeAdamW(params_of(300))
    assert stepped(muon, [matrix], 0)[0].ne(1).any()
    free.eval()
    with pytest.raises(RuntimeError, match="^ScheduleFreeAdamW: step: expected train mode"):
        free.step()


def test_other_threads_run_during_a_step() -> None:
    """A step does not hold Python's global lock while the operator runs."""
    params, seen = params_of(300), threading.Event()

    def wait(call: Any) -> None:
        # The kernel of this test is Python code, which releases the lock while it sleeps. Python's own lock
        # must not be held by the thread that has called step().
        assert seen.wait(30)
        call()

    thread = threading.Thread(target=lambda: (time.sleep(0.05), seen.set()))
    thread.start()
    with replaced("adamw_", wait):
        stepped(AdamW(params), params, 0)
    thread.join()


def test_sets_of_parameters_are_refused_as_in_torch() -> None:
    groups = [{"params": set(nn.Linear(4, 4).parameters())}]
    for kind in (torch.optim.AdamW, AdamW, Muon):
        with pytest.raises(TypeError, match=r"\bset\b|ordered"):
            kind(groups)

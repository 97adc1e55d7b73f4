"""Tests that the optimizer operators refuse bad arguments with an error that names the argument."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizer_rules import ADAMW, ADEMAMIX, APPLY, EMA, LION, SCHEDULE_FREE, SGD, Rule
from shoestring import optim

pytestmark = pytest.mark.device

BAD = {
    "grads: expected one": lambda a: a["grads"].pop(),
    "grads\\[1\\]: expected the parameter's shape": lambda a: a["grads"].__setitem__(1, torch.zeros(21)),
    "grads\\[1\\]: expected fp32, bf16 or fp16": lambda a: a["grads"].__setitem__(
        1, torch.zeros(20).double()
    ),
    "grads\\[1\\]: expected a dense": lambda a: a["grads"].__setitem__(1, torch.zeros(20).to_sparse()),
    "params\\[1\\]: expected fp32, bf16 or fp16": lambda a: a["params"].__setitem__(
        1, torch.zeros(20).double()
    ),
    "params\\[1\\]: expected a tensor without overlapping memory": lambda a: a["params"].__setitem__(
        1, torch.zeros(1).expand(20)
    ),
    "step: expected a contiguous Float tensor of shape \\(2\\)": lambda a: a.update(step=torch.zeros(3)),
    "lr: expected": lambda a: a.update(lr=-1.0),
    "lr_tensor: expected one fp32 number": lambda a: a.update(lr_tensor=torch.zeros(1).double()),
    "grad_scale: expected one fp32 number": lambda a: a.update(grad_scale=torch.ones(2)),
    "clip_coef: expected one fp32 number": lambda a: a.update(clip_coef=torch.ones(1).half()),
    "found_inf: expected one fp32 number": lambda a: a.update(found_inf=torch.ones(1, dtype=torch.bool)),
}
BAD_OWN = [
    (ADAMW, "exp_avg: expected a contiguous Byte", dict(exp_avg=torch.zeros(768))),
    (ADAMW, "exp_avg_sq: expected .* shape \\(768\\)", dict(exp_avg_sq=torch.zeros(512, dtype=torch.uint8))),
    (ADAMW, "exp_avg_sq_scale: expected", dict(exp_avg_sq_scale=torch.zeros(4))),
    (ADAMW, "exp_avg_scale and exp_avg_sq_scale: expected both .* or neither", dict(exp_avg_scale=None)),
    (ADAMW, "beta1: expected", dict(beta1=-0.1)),
    (ADAMW, "weight_decay: expected", dict(weight_decay=-0.1)),
    (ADAMW, "beta2: expected", dict(beta2=1.0)),
    (ADAMW, "eps: expected", dict(eps=math.nan)),
    (LION, "exp_avg: expected a contiguous Float", dict(exp_avg_scale=None)),
    (LION, "exp_avg_scale: expected", dict(exp_avg_scale=torch.zeros(4))),
    (LION, "beta1: expected", dict(beta1=1.0)),
    (LION, "weight_decay: expected", dict(weight_decay=math.nan)),
    (LION, "beta2: expected", dict(beta2=math.nan)),
    (
        SGD,
        "momentum_buffer: expected .* shape \\(768\\)",
        dict(momentum_buffer=torch.zeros(512, dtype=torch.uint8)),
    ),
    (SGD, "momentum_buffer_scale: expected", dict(momentum_buffer_scale=torch.zeros(3).double())),
    (
        SGD,
        r"momentum: expected a number above 0 \(without momentum use torch::optim::SGD\), received 0",
        dict(momentum=0.0),
    ),
    (SGD, "dampening: expected a number that is finite, received inf", dict(dampening=math.inf)),
    (SGD, "dampening: expected 0 with nesterov, received 0.25", dict(nesterov=True)),
    (SGD, "weight_decay: expected", dict(weight_decay=-0.1)),
    (APPLY, "weight_decay: expected", dict(weight_decay=-0.1)),
    (ADEMAMIX, "beta3: expected a number in", dict(beta3=1.0)),
    (ADEMAMIX, "beta3: expected a number of at least beta1, and beta1 above 0", dict(beta3=0.5)),
    (ADEMAMIX, "alpha: expected", dict(alpha=-1.0)),
    (ADEMAMIX, "t_alpha: expected None or a number of steps, received 0", dict(t_alpha=0)),
    (ADEMAMIX, "t_beta3: expected None or a number of steps, received -1", dict(t_beta3=-1)),
    (ADEMAMIX, "exp_avg_scale and exp_avg_sq_scale: expected both", dict(exp_avg_sq_scale=None)),
    (
        ADEMAMIX,
        "exp_avg_slow: expected a contiguous BFloat16",
        dict(exp_avg_slow=torch.zeros(768, dtype=torch.uint8)),
    ),
    (SCHEDULE_FREE, "beta1: expected a number above 0, received 0", dict(beta1=0.0)),
    (SCHEDULE_FREE, r"beta1: expected a number in \[0, 1\), received nan", dict(beta1=math.nan)),
    (SCHEDULE_FREE, "beta2: expected", dict(beta2=1.0)),
    (SCHEDULE_FREE, "eps: expected", dict(eps=-1.0)),
    (
        SCHEDULE_FREE,
        "warmup_steps: expected a whole number of at least 0, received -1",
        dict(warmup_steps=-1),
    ),
    (SCHEDULE_FREE, "offset: expected a contiguous BFloat16", dict(offset=torch.zeros(768))),
    (
        SCHEDULE_FREE,
        "offset: expected a contiguous Float",
        dict(exp_avg_sq=torch.zeros(768), exp_avg_sq_scale=None),
    ),
    (EMA, "beta: expected", dict(beta=1.0)),
    (EMA, "exp_avg: expected a contiguous Float", dict(exp_avg_scale=None)),
]


def check_refused(rule: Rule, message: str, change: Callable[[dict], object]) -> None:
    """Assert that a bad argument raises an error with `message` and leaves parameters and state unchanged."""
    params = [torch.ones(300), torch.ones(20)]
    state = dict(zip(rule.arena_names(), rule.arenas([300, 20], "8bit"), strict=True))
    arguments = {"params": list(params), "grads": [torch.ones(300), torch.ones(20)], **state, **rule.hyper}
    change(arguments)
    with pytest.raises(RuntimeError, match=f"{rule.name}_: {message}"):
        rule.step(**arguments)
    assert all((p == 1).all() for p in params) and all((t == 0).all() for t in state.values())


@pytest.mark.parametrize(
    "rule", [ADAMW, LION, SGD, ADEMAMIX, SCHEDULE_FREE, APPLY, EMA], ids=lambda r: r.name
)
@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_of_any_rule(rule: Rule, message: str) -> None:
    check_refused(rule, message, BAD[message])


@pytest.mark.parametrize(("rule", "message", "changes"), BAD_OWN, ids=lambda x: getattr(x, "name", None))
def test_a_bad_argument_of_its_own(rule: Rule, message: str, changes: dict) -> None:
    check_refused(rule, message, lambda a: a.update(changes))


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"offload": "cpu"}, {"offload": "stream"}], ids=str
)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.Muon, optim.Adafactor], ids=lambda c: c.__name__)
def test_a_parameter_that_has_moved(optimizer: Any, in_backward: bool, options: dict[str, Any]) -> None:
    """A parameter that leaves its device after a step is refused, and no other parameter is stepped."""
    params = [nn.Parameter(torch.randn(20, 16)) for _ in range(2)]
    own = optimizer([{"params": [p]} for p in params], lr=1e-3, step_in_backward=in_backward, **options)
    sum(p.sum() for p in params).backward()
    own.step()
    own.zero_grad()
    before = params[0].detach().clone()
    params[1] = own.param_groups[1]["params"][0] = nn.Parameter(params[1].detach().to("meta"))
    message = (
        f"^{optimizer.__name__}: params: expected all parameters on {before.device}, for which their state was made, received one "
        "on meta. Make the optimizer after the model has been moved.$"
    )
    with pytest.raises(RuntimeError, match=message):
        if not in_backward:
            params[0].grad = torch.ones(20, 16)
        params[1].sum().backward()
        own.step()
    assert torch.equal(params[0], before)

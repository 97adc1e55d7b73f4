"""Tests of shoestring.optim.AdamW with torch.amp.GradScaler and with a learning rate stored in a tensor."""

import pytest
import torch
from test_adamw_optimizer import gradients, parameters, same

from shoestring.optim import AdamW

pytestmark = pytest.mark.device


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_grad_scaler(unscale: bool) -> None:
    """With a GradScaler, steps equal those without loss scaling, and infinite gradients skip the step."""
    ours, plain = parameters(), parameters()
    a, b = AdamW(ours), AdamW(plain)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**10, growth_interval=100)
    for step in range(5):
        scale = scaler.get_scale()
        if step == 2:
            with torch.no_grad():
                for p in ours:
                    p.grad = scaler.scale(torch.full_like(p, torch.inf))
        else:
            gradients(plain, step)
            for p, q in zip(ours, plain, strict=True):
                p.grad = scaler.scale(q.grad)
            b.step()
        if unscale:
            scaler.unscale_(a)
        scaler.step(a)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if step == 2 else scale)
        assert same(ours, plain)
    assert [a.state[p]["step"].item() for p in ours] == [4] * len(ours)
    assert not hasattr(a, "found_inf")
    for p in ours:
        p.grad = None
    scaler.step(a)  # No parameter has a gradient, so scaler.step changes no weight.
    assert same(ours, plain)


def test_a_learning_rate_on_the_device() -> None:
    """Every step reads the learning-rate tensor again, so the next step sees an in-place change."""
    ours, plain = parameters(), parameters()
    rate = torch.tensor(2.0**-5)
    a, b = AdamW(ours, lr=rate), AdamW(plain, lr=2.0**-5)
    for step in range(4):
        gradients(ours, step)
        gradients(plain, step)
        a.step()
        b.step()
        assert same(ours, plain)
        a.param_groups[0]["lr"].mul_(0.5)
        b.param_groups[0]["lr"] *= 0.5

"""Test that several threads may use one optimizer: their calls wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring.optim import AdamW, Averages
from threads import together

STEPS = 40


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(64, 64)) for _ in range(6)]


def stepping(optimizer: Any, params: list[nn.Parameter], steps: int = STEPS) -> Callable[[], None]:
    def step() -> None:
        for _ in range(steps):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()

    return step


@pytest.mark.parametrize("offload", [None, "cpu", "stream"])
def test_threads_step_one_optimizer(offload: str | None) -> None:
    params = weights()
    optimizer = AdamW(params, lr=1e-3, offload=offload)
    together(stepping(optimizer, params), stepping(optimizer, params))
    assert all(state["step"].item() == 2 * STEPS for state in optimizer.state.values())
    assert all(p.isfinite().all() for p in params)


@pytest.mark.fresh
@pytest.mark.parametrize("offload", [None, "cpu", "stream"])
def test_gradients_are_replaced_during_a_step(offload: str | None) -> None:
    """A step reads an old or a new gradient. It holds references to both: without them, most of these runs crash."""
    torch.set_num_threads(1)
    params = weights()
    optimizer = AdamW(params, lr=1e-3, offload=offload)
    together(*[stepping(optimizer, params, 1000)] * 3)
    assert all(state["step"].item() == 3000 for state in optimizer.state.values())


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("other", ["state_dict", "load_state_dict", "add_param_group"])
def test_other_calls_beside_a_step(other: str, offload: str | None) -> None:
    params = weights()
    optimizer = AdamW(params, lr=1e-3, offload=offload)
    stepping(optimizer, params)()
    saved = optimizer.state_dict()
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9))]}),
    }
    together(stepping(optimizer, params), lambda: [calls[other]() for _ in range(STEPS)])
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_gradients_are_dropped_beside_a_step(offload: str | None) -> None:
    """One thread sets the gradients and drops them, since PyTorch itself crashes if one sets what another drops."""
    params = weights()
    optimizer = AdamW(params, lr=1e-3, offload=offload)

    def gradients() -> None:
        for _ in range(STEPS):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.zero_grad()

    together(gradients, lambda: [optimizer.step() for _ in range(STEPS)])
    assert all(p.grad is None and p.isfinite().all() for p in params)
    stepping(optimizer, params)()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("kind", ["ema", "lawa"])
def test_threads_use_the_averages(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    averages = Averages(model, kind, last=3, decay=0.5)
    averages.update()
    state = {name: v.clone() if isinstance(v, Tensor) else v for name, v in averages.state_dict().items()}

    def update() -> None:
        for _ in range(STEPS):
            averages.update()

    together(update, update, lambda: [averages.state_dict() for _ in range(STEPS)])
    assert averages.updates == 2 * STEPS + 1
    averages.load_state_dict(state)
    assert averages.updates == 1


def test_threads_patch_one_model_and_undo_it() -> None:
    pytest.importorskip("transformers")
    from offloaded_llama import batch, llama

    model, other = llama(layers=2).eval(), llama(layers=2).eval()
    x = batch(0)
    with torch.no_grad():
        expected = model(input_ids=x).logits

    def patch(target: nn.Module) -> None:
        for _ in range(3):
            report = None
            try:
                report = shoestring.patch(target)
            except ValueError as error:
                assert "is patched already" in str(error)
            if report is not None:
                report.undo()

    classes = [type(module) for module in model.modules()]
    together(*(lambda target=target: patch(target) for target in (model, model, other)))
    assert [type(module) for module in model.modules()] == classes
    with torch.no_grad():
        assert torch.equal(model(input_ids=x).logits, expected)
        shoestring.patch(other)
        torch.testing.assert_close(other(input_ids=x).logits[..., :], expected, rtol=1e-4, atol=1e-4)

"""Entries of optimizer.state that the user deletes, replaces or adds between steps, compared with torch.optim."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoestring.optim import APOLLO, SAM, AdamW, GaLore, Muon, ScheduleFreeAdamW

pytestmark = pytest.mark.device

Change = Callable[[Any, Parameter], None]


def assign_zeros(optimizer: Any, p: Parameter) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = torch.zeros_like(optimizer.state[p][name])


CHANGES: dict[str, Change] = {
    "delete": lambda optimizer, p: optimizer.state.pop(p),
    "clear": lambda optimizer, p: optimizer.state.clear(),
    "empty entry": lambda optimizer, p: optimizer.state.update({p: {}}),
    "new dict": lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict)),
    "zeros": assign_zeros,
    "step": lambda optimizer, p: optimizer.state[p].update(step=torch.tensor(0.0)),
}


def gradients(p: Tensor, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(p.shape, generator=generator, device="cpu").to(p.device)


def two() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(16, 20)), Parameter(torch.randn(300))]


def step(optimizer: Any, params: list[Parameter], seed: int) -> None:
    for i, p in enumerate(params):
        p.grad = gradients(p, 2 * seed + i)
    optimizer.step()


def changed(make: Callable[[list[Parameter]], Any], change: Change) -> list[Tensor]:
    params = two()
    optimizer = make(params)
    for seed in range(3):
        step(optimizer, params, seed)
    change(optimizer, params[0])
    for seed in range(3, 5):
        step(optimizer, params, seed)
    return [p.detach() for p in params]


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_changes_count_as_in_torch(change: Change) -> None:
    expected = changed(lambda params: torch.optim.AdamW(params, lr=1e-2), change)
    ours = changed(lambda params: AdamW(params, lr=1e-2, state_format="fp32"), change)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["8bit", "4bit", "bf16", "offload", "GaLore", "APOLLO", "Muon", "ScheduleFree"]
)
def test_deleted_state_starts_anew(kind: str) -> None:
    """A parameter without its entry steps like one of a new optimizer, and the others as before."""
    makers: dict[str, Callable[[list[Parameter]], Any]] = {
        "offload": lambda params: AdamW(params, lr=1e-2, offload="stream"),
        "GaLore": lambda params: GaLore(params, lr=1e-2, rank=4),
        "APOLLO": lambda params: APOLLO(params, lr=1e-2, rank=4),
        "Muon": lambda params: Muon(params[:1], lr=1e-2),
        "ScheduleFree": lambda params: ScheduleFreeAdamW(params, lr=1e-2),
    }
    make = makers.get(kind, lambda params: AdamW(params, lr=1e-2, state_format=kind))
    params = two()
    optimizer = make(params)
    for seed in range(3):
        step(optimizer, params, seed)
    del optimizer.state[params[0]]
    alone = Parameter(params[0].detach().clone())
    step(optimizer, params, 3)
    fresh = make([alone, Parameter(torch.zeros(300))])
    alone.grad = gradients(alone, 6)
    fresh.step()
    assert optimizer.state[params[0]]["step"] == 1
    if kind != "Muon":
        assert optimizer.state[params[1]]["step"] == 4
    if kind != "APOLLO":  # draws another random projection
        torch.testing.assert_close(params[0], alone)


def test_steps_in_backward_and_sam_see_the_change() -> None:
    for make in (
        lambda p: AdamW([p], lr=1e-2, step_in_backward=True),
        lambda p: SAM([p], AdamW, lr=1e-2),
    ):
        p = Parameter(torch.randn(300))
        optimizer: Any = make(p)

        def closure(p: Parameter = p) -> Tensor:
            loss = p.square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            closure() if isinstance(optimizer, AdamW) else None
            optimizer.step(*([closure] if isinstance(optimizer, SAM) else []))
        optimizer.state.clear()
        closure() if isinstance(optimizer, AdamW) else None
        optimizer.step(*([closure] if isinstance(optimizer, SAM) else []))
        assert optimizer.state[p]["step"] == 1


def grown(make: Callable[[list[Parameter]], Any], how: str) -> Tensor:
    """Step points, then others in their places: more points or fewer, with their state or without."""
    torch.manual_seed(0)
    p = Parameter(torch.randn(60, 8))
    optimizer = make([p])
    for seed in range(2):
        step(optimizer, [p], seed)
    rows = torch.arange(90) % 60 if "more" in how else torch.arange(59)
    new = Parameter(p.detach()[rows].clone())
    entries = optimizer.state.pop(p) if "untouched" not in how else {}
    if "state" in how:
        optimizer.state[new] = {k: v if k == "step" else v.view(60, 8)[rows] for k, v in entries.items()}
    optimizer.param_groups[0]["params"] = [new]
    for seed in range(2, 4):
        step(optimizer, [new], seed)
    return new.detach()


@pytest.mark.parametrize(
    "how", ["more, state", "fewer, state", "more, fresh", "fewer, fresh", "fewer, untouched"]
)
def test_parameters_of_another_size(how: str) -> None:
    expected = grown(lambda params: torch.optim.AdamW(params, lr=1e-2), how)
    ours = grown(lambda params: AdamW(params, lr=1e-2, state_format="fp32"), how)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_a_parameter_that_replaces_another_keeps_the_state() -> None:
    p = Parameter(torch.randn(300))
    optimizer = AdamW([p])
    step(optimizer, [p], 0)
    new = Parameter(p.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    step(optimizer, [new], 1)
    assert list(optimizer.state) == [new] and optimizer.state[new]["step"] == 2
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_parameters_in_another_order_keep_their_state() -> None:
    def reordered(make: Callable[[list[Parameter]], Any]) -> list[Tensor]:
        params = two()
        optimizer = make(params)
        for seed in range(3):
            step(optimizer, params, seed)
        optimizer.param_groups[0]["params"].reverse()
        for seed in range(3, 5):
            step(optimizer, params, seed)
        return [p.detach() for p in params]

    expected = reordered(lambda params: torch.optim.AdamW(params, lr=1e-2))
    ours = reordered(lambda params: AdamW(params, lr=1e-2, state_format="fp32"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_entries_of_others_are_kept() -> None:
    params = two()
    optimizer = AdamW(params)
    step(optimizer, params, 0)
    before = optimizer.state[params[0]]["exp_avg"]
    optimizer.state[params[0]]["mine"] = 3
    step(optimizer, params, 1)
    optimizer.state[params[0]]["mine"] = 4
    step(optimizer, params, 2)
    assert optimizer.state[params[0]]["mine"] == 4 and optimizer.state[params[0]]["exp_avg"] is before


def test_errors() -> None:
    params = two()
    optimizer = AdamW(params)
    step(optimizer, params, 0)
    entry = dict(optimizer.state[params[0]])
    optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(entry["exp_avg"])
    with pytest.raises(ValueError, match="state: expected new values of exp_avg and exp_avg_scale together"):
        optimizer.step()
    optimizer.state[params[0]] = {**entry, "exp_avg": torch.zeros(16, 20)}
    with pytest.raises(ValueError, match=r"AdamW: state: exp_avg: expected torch.uint8 \(16, 20\)"):
        optimizer.step()
    optimizer.state[params[0]] = copy.copy(entry)
    with optimizer.accumulate():
        params[0].sum().backward()
    del optimizer.state[params[0]]
    with pytest.raises(RuntimeError, match="before the first micro-batch of the next one"):
        optimizer.step()
    optimizer.state[params[0]] = entry
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2

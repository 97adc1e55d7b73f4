"""Tests that averages resume bit for bit, in one language and from one to the other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from build_folder import program
from shoestring.optim import Averages

DECAY, LAST, SEED = 0.9, 3, 7
Weights = dict[str, Tensor]


def steps(count: int) -> list[Weights]:
    """Return the weights of each step: two parameters, a buffer, a counter, and an fp64 parameter."""
    torch.manual_seed(0)
    return [
        {
            "p0": torch.randn(300),
            "p1": torch.randn(3, 70).bfloat16(),
            "p2": torch.randn(4, dtype=torch.float64),
            "b0": torch.randn(5),
            "b1": torch.tensor(step),
        }
        for step in range(count)
    ]


def model_of(weights: Weights) -> nn.Module:
    model = nn.Module()
    for name, t in weights.items():
        if name[0] == "p":
            model.register_parameter(name, nn.Parameter(t.clone()))
        else:
            model.register_buffer(name, t.clone())
    return model


@torch.no_grad()
def run(averages: Averages, model: nn.Module, weights: list[Weights]) -> None:
    for step in weights:
        for name, t in step.items():
            getattr(model, name).copy_(t)
        averages.update()


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[name])), name


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_a_run_that_changes_the_language_has_the_bits_of_one_run(
    kind: Any, format: Any, every: int, tmp_path: Path
) -> None:
    """Python, then C++, then Python again: each loads the state that the other wrote to a safetensors file."""
    weights = steps(15)
    options: dict[str, Any] = {"decay": DECAY, "format": format, "every": every, "last": LAST, "seed": SEED}
    whole_model, model = model_of(weights[0]), model_of(weights[0])
    whole = Averages(whole_model, kind, **options)
    run(whole, whole_model, weights)

    first = Averages(model, kind, **options)
    run(first, model, weights[:5])
    state = first.state_dict()
    assert isinstance(state["updates"], int) and isinstance(state["steps"], int)
    save_file({n: torch.as_tensor(t) for n, t in state.items()}, tmp_path / "state.safetensors")
    flat = {f"{i}.{n}": t for i, step in enumerate(weights[5:10]) for n, t in step.items()}
    save_file(flat, tmp_path / "weights.safetensors")
    subprocess.run([*program("averages_file"), kind, format, str(every), tmp_path], check=True, timeout=60)

    last = Averages(model_of(weights[0]), kind, **options)
    last.load_state_dict(load_file(tmp_path / "state.safetensors"))
    last_model = model_of(weights[0])
    last = Averages(last_model, kind, **options)
    last.load_state_dict(load_file(tmp_path / "state.safetensors"))
    run(last, last_model, weights[10:])
    same(last.state_dict(), whole.state_dict())
    with last.swap(), whole.swap():
        same(dict(last_model.named_parameters()), dict(whole_model.named_parameters()))


def test_the_state_is_a_plain_dict_that_torch_loads_without_pickle(tmp_path: Path) -> None:
    weights = steps(3)
    model = model_of(weights[0])
    averages = Averages(model, "lawa", last=2)
    run(averages, model, weights)
    torch.save(averages.state_dict(), tmp_path / "state.pt")
    again = Averages(model, "lawa", last=2)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    same(again.state_dict(), averages.state_dict())
    fewer = Averages(model, "lawa", last=1)
    fewer.load_state_dict(averages.state_dict())
    assert torch.equal(fewer.state_dict()["snapshot.0.p0"], weights[2]["p0"])
    fresh = Averages(model, "lawa")
    fresh.load_state_dict(Averages(model, "lawa").state_dict())
    assert fresh.updates == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": 1}, r"kind: expected 0 \(ema\), received 1"),
        ({"kind": 0.5}, r"kind: expected one integer, received Double \[\]"),
        ({"updates": 5}, "updates: expected at most the 3 steps, received 5"),
        ({"steps": -1}, "steps: expected a number of at least 0, received -1"),
        ({"steps": None}, "steps: expected a number, received none"),
        ({"average.p0": None}, r"average.p0: expected Float \[300\], received none"),
        ({"average.p0": torch.zeros(2)}, r"average.p0: expected Float \[300\], received Float \[2\]"),
        (
            {"average.p1": torch.zeros(3, 70).bfloat16()},
            r"average.p1: expected Float \[3, 70\], received BFloat16",
        ),
        ({"copy.b1": torch.tensor(1.0)}, r"copy.b1: expected Long \[\], received Float \[\]"),
        ({"average.p9": torch.zeros(2)}, "state: expected 8 tensors of these weights, received 9"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    weights = steps(6)
    model = model_of(weights[0])
    averages = Averages(model)
    run(averages, model, weights[:3])
    state = {**averages.state_dict(), **change}
    state = {n: t for n, t in state.items() if t is not None}
    run(averages, model, weights[3:])
    before = {n: torch.as_tensor(t).clone() for n, t in averages.state_dict().items()}
    with pytest.raises(ValueError, match=f"^Averages: load_state: {message}"):
        averages.load_state_dict(state)
    same(averages.state_dict(), before)

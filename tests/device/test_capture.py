"""A whole step could be captured in a CUDA graph: forward, loss, backward, and an optimizer step with 8-bit state.

A capture fails at a synchronisation. Memory comes from a pool that belongs to the graph, so a step must find all
memory in what the step before it has freed. A replay repeats kernels and no host code, so no operator may read a
tensor of the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from simdev import device as simdev

import shoestring
from fake_device import Recorder
from lora_models import llama

CASES: dict[str, dict[str, Any]] = {
    "all weights": {"state_format": "8bit"},
    "stochastic": {"state_format": "8bit", "weight_rounding": "stochastic"},
    "4-bit state": {"state_format": "4bit"},
    "adapters": {"state_format": "8bit"},
    "step in backward": {"state_format": "8bit", "step_in_backward": True},
}


def step_of(name: str) -> Callable[[], torch.Tensor]:
    """Return a training step of a tiny Llama on the device, which reads the same memory in every call."""
    torch.manual_seed(0)
    model = llama()
    if name == "stochastic":
        model = model.bfloat16()
    if name == "adapters":
        shoestring.lora.apply(model, rank=4, quantize="nf4")
    model.train()
    # On a GPU, linear layers and embeddings are PyTorch's.
    shoestring.patch(model, linear=False, embedding=False)
    model.to("simdev")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = shoestring.optim.AdamW(
        trained, lr=1e-3, max_grad_norm=1.0, min_quantize_size=0, **CASES[name]
    )
    ids = torch.randint(97, (2, 16), device="simdev")
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="simdev").tril()

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def problems_of(step: Callable[[], object]) -> list[str]:
    """Run a step that has run before; return what a capture of it would refuse, or would not repeat."""
    before = simdev.counts()
    simdev.take_synchronisations()
    step()
    after = simdev.counts()
    found = simdev.take_synchronisations()
    assert after.allocations > before.allocations
    if fresh := after.fresh_allocations - before.fresh_allocations:
        found.append(f"{fresh} allocations outside the pool")
    if waits := after.waits - before.waits:
        found.append(f"{waits} operators whose results have a shape that depends on values")
    with Recorder("simdev") as recorder:
        step()
    return found + recorder.problems


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", CASES)
def test_a_step_can_be_captured(name: str) -> None:
    step = step_of(name)
    for _ in range(2):
        step()
    assert problems_of(step) == []


def test_a_step_of_emulated_kernels_can_be_captured(mode: simdev.Mode) -> None:
    """The host functions of CUDA allocate and launch, where the CPU's kernels only allocate results."""
    simdev.configure(simdev.replace(mode, emulate=True))
    step = step_of("all weights")
    for _ in range(2):
        step()
    assert problems_of(step) == []


@pytest.mark.usefixtures("mode")
def test_what_cannot_be_captured_is_found() -> None:
    step = step_of("all weights")
    for _ in range(3):
        step()
    unused = 100_000 + simdev.counts().allocations  # a size that nobody has freed
    kept: list[torch.Tensor] = []
    assert problems_of(lambda: step().item())
    [problem] = problems_of(lambda: kept.append(torch.zeros(unused, device="simdev")))
    assert problem == "1 allocations outside the pool"
    host = torch.ones(3)
    assert any("received cpu" in problem for problem in problems_of(lambda: step() + host.to("simdev")))


def test_grouped_linear_can_be_captured(mode: simdev.Mode) -> None:
    """The kernels of CUDA find the experts and the slots of each row without the host."""
    simdev.configure(replace(mode, emulate=True))
    torch.manual_seed(7)
    x, weight, bias = (
        torch.randn(*shape, device="simdev").bfloat16().requires_grad_()
        for shape in ((30, 40), (3, 24, 40), (3, 24))
    )
    rows = torch.randint(30, (60,), device="simdev")
    offsets = torch.tensor([1, 20, 20, 58]).to("simdev")

    def step() -> tuple[torch.Tensor, ...]:
        out = torch.ops.shoestring.grouped_linear(x, weight, offsets, rows=rows, bias=bias)
        return torch.autograd.grad(out, (x, weight, bias), out.detach())

    for _ in range(2):
        step()
    assert problems_of(step) == []

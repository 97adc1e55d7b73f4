"""Every optimizer takes the same steps on the device as on the CPU, and the host never waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import nn

import shoestring.optim
from training import busy, compare, mlp, rows

# The optimizers with the state formats that run; None is the default, "8bit" for most.
FORMATS: dict[str, tuple[str | None, ...]] = {
    "AdamW": ("fp32", "bf16", "8bit", "4bit"),
    "Lion": ("fp32", "8bit"),
    "SGD": ("fp32", "8bit"),
    "AdEMAMix": ("fp32", "8bit"),
    "ScheduleFreeAdamW": ("fp32", "8bit"),
    "Muon": ("fp32", "8bit"),
    "Adafactor": (None,),
    "CAME": (None,),
    "LAMB": ("fp32", "8bit"),
    "GaLore": ("fp32", "8bit"),
    "APOLLO": (None,),
    "APOLLOMini": (None,),
}
CASES = [(name, state) for name, states in FORMATS.items() for state in states]


def options_of(state: str | None) -> dict[str, Any]:
    return {} if state is None else {"state_format": state, "min_quantize_size": 0}


def build(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
    optimizer: torch.optim.Optimizer = getattr(shoestring.optim, name)(parameters, **options)
    return optimizer


@pytest.mark.parametrize(("name", "state"), CASES)
def test_equals_cpu(mode: simdev.Mode, name: str, state: str | None) -> None:
    options = options_of(state)
    waited = compare(mlp(), lambda model, device: build(name, model, lr=1e-3, **options))
    assert waited == []


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bf16_weights_equal_cpu(mode: simdev.Mode, rounding: str) -> None:
    options = {"state_format": "8bit", "weight_rounding": rounding, "max_grad_norm": 0.1}
    waited = compare(mlp(torch.bfloat16), lambda model, device: build("AdamW", model, **options))
    assert waited == []


def test_steps_in_backward_equal_cpu(mode: simdev.Mode) -> None:
    waited = compare(mlp(), lambda model, device: build("AdamW", model, step_in_backward=True))
    assert waited == []


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("place", ["stream", "cpu", "nvme"])
def test_offloaded_state_equals_cpu(mode: simdev.Mode, tmp_path: Path, place: str, in_backward: bool) -> None:
    """On the CPU the state stays where it is."""
    options = {"state_format": "8bit", "min_quantize_size": 0, "step_in_backward": in_backward}
    offload = f"nvme:{tmp_path}" if place == "nvme" else place

    def make(model: nn.Module, device: str) -> torch.optim.Optimizer:
        return build("AdamW", model, **options, **({"offload": offload} if device != "cpu" else {}))

    compare(mlp(), make)


def test_accumulated_gradients_equal_cpu(mode: simdev.Mode) -> None:
    """The copy of a gradient takes the host memory of the one before only when that one has been added."""
    results = []
    for device, place in (("simdev", {"offload": "cpu"}), ("cpu", {})):
        model = mlp().to(device)
        optimizer: Any = build("AdamW", model, lr=1e-3, step_in_backward=True, **place)
        for step in range(2):
            losses = [model(rows(3 * step + part).to(device)).square().mean() for part in range(3)]
            work = busy()
            with optimizer.accumulate():
                for loss in losses[:2]:
                    loss.backward()
            losses[2].backward()
            del work
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_gradient_scaler_equals_cpu(mode: simdev.Mode) -> None:
    """A scale that makes the first gradients infinite is halved, and its step is left out."""
    results = []
    for device in ("simdev", "cpu"):
        model = mlp().to(device)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = build("AdamW", model, lr=1e-3, max_grad_norm=1.0)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**127, backoff_factor=2.0**-60)
        for step in range(3):
            loss = model(rows(step).to(device)).square().mean() * 2.0**40
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 0:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        results.append([scaler.get_scale(), *(p.detach().cpu() for p in model.parameters())])
    assert results[0][0] == results[1][0] == 2.0**67
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:]))


def test_step_takes_memory_from_the_pool(mode: simdev.Mode) -> None:
    """Once two steps have run, further ones allocate no memory that is not in the pool.

    A stream that is lazy or delayed gives memory of other streams back late, so this holds for one stream.
    """
    model = mlp().to("simdev")
    optimizer = build("AdamW", model, state_format="8bit", min_quantize_size=0)
    batches = [rows(step).to("simdev") for step in range(5)]
    for step, batch in enumerate(batches):
        if step == 2:
            before = simdev.counts()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = simdev.counts()
    assert after.allocations > before.allocations
    assert after.fresh_allocations == before.fresh_allocations
    assert after.synchronisations == before.synchronisations


def test_sharpness_aware_steps_equal_cpu(mode: simdev.Mode) -> None:
    results = []
    for device in ("simdev", "cpu"):
        model = mlp().to(device)
        optimizer = shoestring.optim.SAM(model.parameters(), shoestring.optim.AdamW, rho=0.05, lr=1e-3)
        for step in range(3):
            batch = rows(step).to(device)

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                loss: torch.Tensor = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))

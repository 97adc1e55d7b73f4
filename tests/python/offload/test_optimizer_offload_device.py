"""Tests of offloaded optimizer state on a device: copies that overlap kernels, and steps on the CPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from relative_error import relative_error
from shoestring.optim import AdamW

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def real(backend: str) -> None:
    if backend == "simt":
        pytest.skip("of streams, which the emulator has none of")


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4))).to(dtype)


def train(opt: AdamW, model: nn.Module, dtype: torch.dtype, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for micro in range(3):
            loss = model(torch.randn(16, 1500).to(dtype)).float().square().mean() / 3
            if micro < 2:
                with opt.accumulate():
                    loss.backward()
            else:
                loss.backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.parametrize("place", ["stream", "nvme"])
def test_streamed_state_is_the_same(place: str, state: str, tmp_path: Path) -> None:
    models = [model_of(torch.bfloat16) for _ in range(2)]
    for model, where in zip(models, (None, f"nvme:{tmp_path}" if place == "nvme" else place), strict=True):
        opt = AdamW(
            model.parameters(),
            lr=1e-3,
            state_format=state,
            weight_rounding="remainder",
            max_grad_norm=0.1,
            offload=where,
        )
        train(opt, model, torch.bfloat16, 3)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("in_backward", [False, True], ids=["", "in backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_steps_as_the_device_does(dtype: torch.dtype, in_backward: bool) -> None:
    models = [model_of(dtype) for _ in range(2)]
    before = [p.detach().clone() for p in models[0].parameters()]
    for model, where in zip(models, (None, "cpu"), strict=True):
        opt = AdamW(
            model.parameters(),
            lr=1e-3,
            state_format="fp32",
            weight_rounding="remainder",
            max_grad_norm=0.1,
            offload=where,
            step_in_backward=in_backward and where is not None,
        )
        train(opt, model, dtype, 3)
        assert all(entry["exp_avg"].device.type == "cpu" for entry in opt.state.values()) or where is None
    for p, q, start in zip(models[0].parameters(), models[1].parameters(), before, strict=True):
        # CPU and device implement the same update rule, but their sums and square roots differ in the last
        # bits.
        assert relative_error(q - start, p - start) < (1e-4 if dtype == torch.float32 else 2e-2)

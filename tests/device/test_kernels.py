"""The host functions of CUDA operators, with emulated kernels that run late.

Emulated kernels differ from the CPU's in the last bits, so results are compared with those of a device that waits for
each kernel.
"""

import copy
from dataclasses import replace

import pytest
import torch
from simdev import device as simdev
from test_llama import IDS, MODELS, adamw, loss_of
from torch import Tensor, nn

import shoestring
from lora_models import llama
from training import STEPS, mlp, rows, train


def train_in(mode: simdev.Mode, model: nn.Module, **how: object) -> tuple[list[Tensor], list[str]]:
    simdev.configure(replace(mode, emulate=True))
    model = copy.deepcopy(model).to("simdev")
    losses, waited = train(model, "simdev", **how)
    simdev.synchronize()
    return [losses.cpu(), *(p.detach().cpu() for p in model.parameters() if p.requires_grad)], waited


def assert_independent_of_time(mode: simdev.Mode, model: nn.Module, **how: object) -> None:
    """Assert equal results in a mode and with waits, and that the host never waits in the mode."""
    expected, _ = train_in(simdev.Mode(blocking=True), model, **how)
    found, waited = train_in(mode, model, **how)
    assert waited == []
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit", "4bit"])
def test_optimizer(mode: simdev.Mode, state: str) -> None:
    def make(model: nn.Module, device: str) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = shoestring.optim.AdamW(
            model.parameters(), lr=1e-3, state_format=state, min_quantize_size=0, max_grad_norm=0.5
        )
        return optimizer

    assert_independent_of_time(
        mode, mlp(), make_optimizer=make, batches=[rows(step) for step in range(STEPS)]
    )


@pytest.mark.parametrize("name", ["patched", "lora dropout", "nf4"])
def test_llama(mode: simdev.Mode, name: str) -> None:
    assert_independent_of_time(
        mode, MODELS[name](llama()), make_optimizer=adamw, batches=IDS[:2], loss_of=loss_of
    )

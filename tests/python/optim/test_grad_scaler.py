"""Tests that the C++ class ``optim::GradScaler`` agrees with ``torch.amp.GradScaler`` step by step."""

import itertools
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from build_folder import program
from shoestring.optim import AdamW

SHAPES = [(300,), (1,), (3, 700), (0,)]
MICRO_BATCHES = 2
# Factor of the gradients in each step. A factor that is not finite makes one gradient of the step not finite,
# in the first or the second micro-batch. The gradients with the factor 1e37 overflow when they are scaled.
FACTORS = [1.0, 0.5, float("inf"), 2.0, float("nan"), float("-inf"), 1.0, 1.0, 1e37, 1.0, 1.0]
SKIPPED = [2, 4, 5, 8]
STATE: dict[str, Any] = {
    "scale": 2.0**12,
    "growth_factor": 3.0,
    "backoff_factor": 0.3,
    "growth_interval": 2,
    "_growth_tracker": 1,
}


def weights(dtypes: list[torch.dtype]) -> list[Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def gradients(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    torch.manual_seed(2)
    grads = {}
    for step, factor in enumerate(FACTORS):
        finite = factor - factor == 0
        for micro, (i, shape) in itertools.product(range(MICRO_BATCHES), enumerate(SHAPES)):
            grad = torch.randn(shape) * (factor if finite else 1.0)
            if not finite and micro == step % MICRO_BATCHES and i == 2:
                grad[1, 77] = factor
            grads[f"{step}.{micro}.{i}"] = grad.to(dtypes[i])
    return grads


def train(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    grads: dict[str, Tensor],
    unscales: bool,
    max_norm: float,
) -> tuple[dict[str, Any], torch.amp.GradScaler]:
    """Train as the C++ program does; return the weights and the scaler's state after each step."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(STATE)
    steps: dict[str, Any] = {}
    for step in range(len(FACTORS)):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            loss = torch.zeros(())
            for i, p in enumerate(params):
                loss = loss + (p * grads[f"{step}.{micro}.{i}"]).sum()
            scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(params, max_norm)
        scaler.step(optimizer)
        scaler.update()
        steps |= {f"{step}.{i}": p.detach().clone() for i, p in enumerate(params)}
        steps |= {f"{step}.{key}": value for key, value in scaler.state_dict().items()}
    return steps, scaler


def test_steps_in_both_languages_are_the_same(tmp_path: Path) -> None:
    """Scales, growth trackers and weights of both languages have the same bits after each step."""
    fp32, mixed = [torch.float32] * 4, [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    command, expected = program("grad_scaler_file"), {}
    cases = itertools.product(("SGD", "AdamW", "AdamW-8bit"), (False, True), (0.0, 0.5), (fp32, mixed))
    for number, (name, unscales, max_norm, dtypes) in enumerate(cases):
        if name == "SGD" and max_norm > 0 and not unscales:
            continue  # only our optimizers clip within the step
        folder = tmp_path / str(number)
        folder.mkdir()
        params, grads = weights(dtypes), gradients(dtypes)
        save_file({str(i): p.detach() for i, p in enumerate(params)}, folder / "params.safetensors")
        save_file(grads, folder / "grads.safetensors")
        state = {key: torch.tensor(value, dtype=torch.float64) for key, value in STATE.items()}
        save_file(state, folder / "scaler.safetensors")
        optimizer: torch.optim.Optimizer
        if name == "SGD":
            optimizer = torch.optim.SGD(params, 0.1, momentum=0.5, weight_decay=0.3)
        else:
            norm = None if unscales or max_norm == 0 else max_norm
            moments = "fp32" if name == "AdamW" else "8bit"
            optimizer = AdamW(params, 0.01, weight_decay=0.3, state_format=moments, max_grad_norm=norm)
        case = (name, unscales, max_norm, dtypes is mixed)
        expected[case] = folder, *train(optimizer, params, grads, unscales, max_norm)
        command += [name, str(int(unscales)), str(max_norm), str(folder)]

    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, (folder, steps, scaler) in expected.items():
        ours = load_file(folder / "steps.safetensors")
        assert ours.keys() == steps.keys(), case
        for key, value in steps.items():
            same = torch.equal(ours[key], value) if isinstance(value, Tensor) else ours[key].item() == value
            assert same, (case, key, ours[key], value)
        skipped = [
            step for step in range(1, len(FACTORS)) if torch.equal(steps[f"{step}.2"], steps[f"{step - 1}.2"])
        ]
        assert skipped == SKIPPED, case
        # PyTorch's scaler reads the state that the C++ program has saved.
        saved = {key: value.item() for key, value in load_file(folder / "scaler.safetensors").items()}
        loaded = torch.amp.GradScaler("cpu")
        loaded.load_state_dict(saved)
        assert loaded.state_dict() == scaler.state_dict() == saved, case

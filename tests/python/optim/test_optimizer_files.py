"""Tests that Python and C++ load each other's optimizer files and continue with the same bits."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoestring
from build_folder import BUILD, program
from shoestring.optim import (
    APOLLO,
    CAME,
    LAMB,
    SGD,
    Adafactor,
    AdamW,
    AdEMAMix,
    APOLLOMini,
    GaLore,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    load_optimizer,
    save_optimizer,
)
from shoestring.optim.state_layout import ROUNDINGS, STATES

# Shapes of the parameters in two groups. One parameter is smaller than a state block of 256 elements, several
# span more than one block, and one has no elements.
SIZES = [[(300,), (1,), (3, 700)], [(0,), (513,)]]
MATRICES = [[(3, 100), (1, 1), (3, 700)], [(0, 4), (27, 19)]]
STEPS = 6
# (group, index in the group) of a parameter that gets its first gradient after the file is saved.
LATE = (1, 1)
RULES = {
    "AdamW": (AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
    "Lion": (Lion, {"betas": (0.7, 0.9), "weight_decay": 0.3}),
    "SGD": (SGD, {"momentum": 0.7, "dampening": 0.2, "weight_decay": 0.3}),
    "Nesterov": (SGD, {"nesterov": True}),
    "AdEMAMix": (AdEMAMix, {"betas": (0.8, 0.95, 0.99), "alpha": 3.0, "t_alpha": 4, "t_beta3": 5}),
    "ScheduleFreeAdamW": (ScheduleFreeAdamW, {"betas": (0.8, 0.95), "weight_decay": 0.3, "warmup_steps": 4}),
    "LAMB": (LAMB, {"betas": (0.8, 0.95), "weight_decay": 0.3}),
    "Adafactor": (Adafactor, {"d": 1.5, "weight_decay": 0.3}),
    "CAME": (
        CAME,
        {"betas": (0.8, 0.95, 0.99), "eps": (1e-20, 1e-10), "clip_threshold": 0.5, "weight_decay": 0.3},
    ),
    "Muon": (Muon, {"momentum": 0.8, "ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 4, "eps": 1e-6}),
}
LOW_RANK = {
    "GaLore": (GaLore, {"rank": 4}),
    "APOLLO": (APOLLO, {"rank": 4, "scale": 0.5}),
    "APOLLOMini": (APOLLOMini, {}),
}


def sizes(rule: str) -> list[list[tuple[int, ...]]]:
    if rule in LOW_RANK:
        return [[*SIZES[0], (40, 24), (5, 3, 4)], [*SIZES[1], (16, 24)]]
    return MATRICES if rule == "Muon" else SIZES


def weights(rule: str, dtype: torch.dtype) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(shape).to(dtype) for shape in group] for group in sizes(rule)]


def make(rule: str, params: list[list[Tensor]], **options: Any) -> shoestring.optim.AdamW:
    """Return an optimizer whose second group has other options than the first."""
    kind, own = RULES[rule]
    groups = [{"params": params[0]}, {"params": params[1], "lr": 0.02, "min_quantize_size": 600, "seed": 5}]
    return kind(groups, lr=0.01, **own, seed=2**40, maximize=True, **options)


def named(params: list[list[Tensor]]) -> dict[str, Tensor]:
    return {f"{g}.{i}": p for g, group in enumerate(params) for i, p in enumerate(group)}


def gradients(rule: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(2)
    every = {
        (step, g, i): torch.randn(shape).to(dtype)
        for step in range(STEPS)
        for g, group in enumerate(sizes(rule))
        for i, shape in enumerate(group)
    }
    return {f"{s}.{g}.{i}": grad for (s, g, i), grad in every.items() if s >= STEPS // 2 or (g, i) != LATE}


def run_python(
    optimizer: AdamW, params: list[list[Tensor]], grads: dict[str, Tensor], first: int, last: int
) -> None:
    """Take the steps `first` to `last - 1` in the same way as the C++ test program.

    Schedule-Free AdamW ends in eval mode, so the weights then hold the average x.
    """
    averages = isinstance(optimizer, ScheduleFreeAdamW)
    if averages:
        optimizer.train()
    for step in range(first, last):
        for key, p in named(params).items():
            p.grad = grads.get(f"{step}.{key}")
        optimizer.step()
    if averages:
        optimizer.eval()


def run_cpp(*runs: tuple[str, Path, int, int, float]) -> subprocess.CompletedProcess[str]:
    """Run the C++ test program, which takes optimizer steps and saves files.

    Args:
        runs: for each run, the name of the optimizer rule, the folder, the first step, one past the last
            step, and max_grad_norm (0 for no clipping).
    """
    command = [
        *program("optimizer_file"),
        *(str(part) for rule, *rest in runs for part in ((RULES | LOW_RANK)[rule][0].__name__, *rest)),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_WAIT_POLICY": "passive"}
    )


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


def state_of(optimizer: AdamW) -> dict[str, Tensor]:
    return {f"{i}.{k}": v for i, entry in optimizer.state_dict()["state"].items() for k, v in entry.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.sample(5)
def test_steps_in_both_languages_are_the_same(rule: str, tmp_path: Path) -> None:
    """Three steps in Python and, from the saved file, three in C++ give the bits of six steps in Python.

    So do three steps in C++ and three in Python.
    """
    half, runs, checks = STEPS // 2, [], []
    for state, mode in itertools.product(STATES, ROUNDINGS):
        dtype = torch.float32 if mode == "nearest" else torch.bfloat16
        norm = 0.0 if mode == "stochastic" else 0.5
        options = {"state_format": state, "weight_rounding": mode, "max_grad_norm": norm or None}
        grads, params = gradients(rule, dtype), weights(rule, dtype)
        whole = make(rule, params, **options)
        run_python(whole, params, grads, 0, half)
        run_python(whole, params, grads, half, STEPS)
        for python_first in (True, False):
            folder, mixed = tmp_path / f"{state}-{mode}-{python_first}", weights(rule, dtype)
            folder.mkdir()
            optimizer = make(rule, mixed, **options)
            if python_first:
                run_python(optimizer, mixed, grads, 0, half)
            save_optimizer(optimizer, folder / "optimizer.safetensors")
            save_file(named(mixed), folder / "params.safetensors")
            save_file(grads, folder / "grads.safetensors")
            runs.append((rule, folder, *((half, STEPS) if python_first else (0, half)), norm))
            checks.append((whole, params, grads, folder, python_first))
    done = run_cpp(*runs)
    assert done.returncode == 0, done.stderr
    for whole, params, grads, folder, python_first in checks:
        loaded = load_file(folder / "params.safetensors")
        mixed = [[loaded[f"{g}.{i}"] for i in range(len(shapes))] for g, shapes in enumerate(sizes(rule))]
        groups = [{"params": group} for group in mixed]
        # All options except max_grad_norm come from the file.
        optimizer = RULES[rule][0](groups, max_grad_norm=whole.max_grad_norm)
        load_optimizer(optimizer, folder / "optimizer.safetensors")
        if not python_first:
            run_python(optimizer, mixed, grads, half, STEPS)
        assert same(named(mixed), named(params)), folder.name
        assert same(state_of(optimizer), state_of(whole)), folder.name
        for ours, theirs in zip(optimizer.param_groups, whole.param_groups, strict=True):
            assert ours | {"params": None} == theirs | {"params": None}


@pytest.mark.parametrize("norm", [0.0, 5.0])
@pytest.mark.parametrize("rule", LOW_RANK)
def test_low_rank_steps_are_the_same_in_both_languages(rule: str, norm: float, tmp_path: Path) -> None:
    """The steps of GaLore and APOLLO in Python agree with those of the C++ program with equal options.

    Python and C++ draw the same random numbers, which depend on the seed and on the position of the
    parameter.
    """
    kind, own = LOW_RANK[rule]
    params, grads = weights(rule, torch.float32), gradients(rule, torch.float32)
    save_file(
        start := named([[p.clone() for p in group] for group in params]), tmp_path / "params.safetensors"
    )
    save_file(grads, tmp_path / "grads.safetensors")
    groups = [{"params": group} for group in params]
    optimizer = kind(
        groups, AdamW, lr=0.01, weight_decay=0.3, state_format="fp32", update_proj_gap=2, seed=3, **own
    )
    optimizer.max_grad_norm = norm or None
    run_python(optimizer, params, grads, 0, STEPS)
    done = run_cpp((rule, tmp_path, 0, STEPS, norm))
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "params.safetensors")
    for key, ours in named(params).items():
        if ours.numel() > 0:
            way = ours - start[key]
            assert (theirs[key] - ours).norm() < 1e-5 * way.norm() and way.norm() > 0.01


def test_schedulers_tensors_and_norms_survive(tmp_path: Path) -> None:
    """An optimizer's file keeps a scheduler's group entries, a learning rate tensor and the gradient norm.

    C++ has no scheduler entries in groups and no learning rates in tensors.
    """
    p, q = torch.randn(300, requires_grad=True), torch.randn(300, requires_grad=True)
    optimizer = AdamW([p], lr=torch.tensor(0.25), step_in_backward=True, max_grad_norm=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    (p * torch.randn(300)).sum().backward()
    optimizer.step()
    save_optimizer(optimizer, tmp_path / "a")
    other = AdamW([q], lr=torch.tensor(0.5), step_in_backward=True, max_grad_norm=1.0)
    load_optimizer(other, str(tmp_path / "a"))
    assert isinstance(other.param_groups[0]["lr"], Tensor) and other.param_groups[0]["lr"] == 0.25
    assert other.param_groups[0]["initial_lr"] == 0.25
    assert torch.equal(other.grad_norm, optimizer.grad_norm)
    assert same(state_of(other), state_of(optimizer))


def test_a_loaded_optimizer_is_saved_again(tmp_path: Path) -> None:
    """PyTorch adds a default while it loads a state, which a file does not have."""
    params = [[torch.ones(300).requires_grad_()]]
    optimizer = AdamW(params[0])
    params[0][0].grad = torch.ones(300)
    optimizer.step()
    save_optimizer(optimizer, tmp_path / "first")
    again = AdamW(params[0])
    load_optimizer(again, tmp_path / "first")
    save_optimizer(again, tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def params() -> list[Tensor]:
        return [torch.randn(300), torch.randn(3)]

    optimizer, path, bad = AdamW(params()), tmp_path / "a", tmp_path / "bad"
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    save_optimizer(optimizer, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)

    def refused(other: AdamW, file: Path, message: str) -> None:
        before = repr(other.state_dict())
        with pytest.raises(ValueError, match=message):
            load_optimizer(other, file)
        assert repr(other.state_dict()) == before

    refused(Lion(params()), path, f"Lion: load_optimizer: {path}: expected optimizer Lion, received AdamW")
    refused(AdamW([{"params": [p]} for p in params()]), path, "expected 2 groups of parameters, received 1")
    refused(AdamW(params()[:1]), path, "expected 1 parameters in group 0, received 2")
    refused(
        AdamW([torch.randn(300), torch.randn(4)]), path, r"exp_avg: expected torch.uint8 \(4,\), received"
    )
    same_options = json.loads(metadata["groups"])
    for changed, message in [
        ({"format": "pt"}, "expected format shoestring.optimizer, received pt"),
        ({"format_version": "2"}, "expected format_version 1, received 2"),
        ({"groups": metadata["groups"][1:]}, "expected groups with the options"),
        ({"groups": "[3]"}, "expected groups with the options"),
        (
            {"groups": json.dumps([same_options[0] | {"options": {"lr": 1}}])},
            "expected groups with the options",
        ),
        (
            {"groups": metadata["groups"].replace('"lr": 0.001', '"lr": -1')},
            "lr: expected a number of at least 0",
        ),
    ]:
        save_file(tensors, bad, metadata=metadata | changed)
        refused(AdamW(params()), bad, message)
    for name in ("1.0.step", "step", "0.-1.step", "0.2.step"):
        save_file(tensors | {name: torch.zeros(())}, bad, metadata=metadata)
        refused(
            AdamW(params()), bad, "expected tensors <group>.<index>.<name>, of the file's groups, received"
        )
    bad.write_bytes(path.read_bytes()[:-5])
    refused(AdamW(params()), bad, "expected a safetensors file, received a damaged one")
    with pytest.raises(FileNotFoundError):
        load_optimizer(optimizer, tmp_path / "none")
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(ValueError, match="save_optimizer: group 0: expected options that JSON can hold"):
        save_optimizer(optimizer, path)


def test_cpp_refuses_in_one_line(tmp_path: Path) -> None:
    params = weights("AdamW", torch.float32)
    save_file(gradients("AdamW", torch.float32), tmp_path / "grads.safetensors")
    save_file(named(params), tmp_path / "params.safetensors")
    save_optimizer(make("Lion", params), tmp_path / "optimizer.safetensors")
    done = run_cpp(("AdamW", tmp_path, 0, 1, 0.0))
    path = tmp_path / "optimizer.safetensors"
    assert done.returncode == 1
    assert f"AdamW: load_optimizer: {path}: expected optimizer AdamW, received Lion" in done.stderr


KILLED = """
import ctypes, os, sys
import torch, torch._dynamo
from shoestring.optim import AdamW, save_optimizer

def step() -> None:
    p.grad = torch.ones_like(p)
    optimizer.step()
    save_optimizer(optimizer, path)
for n, call in enumerate(("fsync", "rename"), 1):
    if (process := os.fork()) == 0:
        path, p = sys.argv[1] + "/" + call, torch.zeros(100_000)
        optimizer = AdamW([p])
        step()
        ctypes.CDLL(None).kill_at(n, True)  # of libkill_at.so: kill this process before its n-th call
        step()
        os._exit(0)
    print(call, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_kill_while_saving_leaves_the_file_before(tmp_path: Path) -> None:
    """A kill while save_optimizer writes or renames leaves the file of the save before.

    One process imports the libraries and forks a process for each kill, before PyTorch starts a thread.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=120,
        env=os.environ | {"LD_PRELOAD": str(BUILD / "tests/crash/libkill_at.so")},
    )  # fmt: skip
    assert done.stdout.split() == ["fsync", "-9", "rename", "-9"], str(done)
    for call in ("fsync", "rename"):
        optimizer = AdamW([torch.zeros(100_000)])
        load_optimizer(optimizer, tmp_path / call)
        assert optimizer.state_dict()["state"][0]["step"] == 1

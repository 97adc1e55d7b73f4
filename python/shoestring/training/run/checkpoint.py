"""Save and load checkpoints of a training run.

A checkpoint is complete or absent. A run that resumes from a checkpoint has bitwise the same results as an
uninterrupted run.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shoestring.core.dtensors import is_dtensor
from shoestring.core.errors import InputError
from shoestring.files.atomic import PARTIAL, atomic_directory
from shoestring.files.safetensors_file import open_safetensors, save_safetensors
from shoestring.files.write_file import open_to_write, write_text
from shoestring.optim.sharded import local, piece_of
from shoestring.training.run.device import CPU
from shoestring.training.run.processes import whole
from shoestring.training.run.weights import copies_in_host_memory

KEEP = 2  # number of checkpoints kept: the newest one and the one before it
# Name of the JSON file that maps every other file of a checkpoint to its CRC-32 in hexadecimal. Checkpoints
# of older versions have no such file.
CHECKSUMS = "checksums.json"


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that training changes, by name; tied weights appear once."""
    return {
        name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    scaler: GradScaler | None = None,
    device: torch.device = CPU,
    away: bool = False,
    writes: bool = True,
) -> Path:
    """Write the checkpoint folder ``run/checkpoints/step-N`` and keep the newest two checkpoints.

    The checkpoint holds the trained weights, the optimizer state, the state of the loss scaling, the random
    states of the CPU and of ``device``, and ``state`` as JSON. If trained weights may be ``away`` from the device,
    they are all copied to host memory first.
    If several processes train, all of them call this function, and the one that ``writes`` writes the files.
    The files are written to a temporary folder and synced to disk, and then the folder is renamed. If the
    process is killed meanwhile, the previous checkpoint stays intact.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    # All processes gather what they have split.
    tensors = whole(trained_tensors(model), keep=writes)
    optimizer_states = [whole(optimizer.state_dict(), keep=writes) for optimizer in optimizers]
    if not writes:
        return folder
    with atomic_directory(folder) as partial:
        tensors = copies_in_host_memory(model, tensors) if away else tensors
        save_safetensors(partial / "weights.safetensors", tensors, {})
        del tensors
        # Pass an open file, because torch.save with a path hides the error message of the file system.
        with open_to_write(partial / "optimizer.pt") as file:
            torch.save(
                {
                    "optimizers": optimizer_states,
                    "scaler": {} if scaler is None else scaler.state_dict(),
                    "rng": _random_states(device),
                },
                file,
            )
        write_text(partial / "state.json", json.dumps({"step": step, **state}))
        sums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
        write_text(partial / CHECKSUMS, json.dumps(sums, indent=2) + "\n")
    # Rename an old checkpoint before removing it. If the process is killed during the removal, the rest of
    # the folder then does not look like a complete checkpoint.
    for old in checkpoints(run)[:-KEEP]:
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)), ignore_errors=True)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of the complete checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    checkpoint_paths = (
        [p for p in folder.glob("step-*") if re.fullmatch("step-[0-9]{8,18}", p.name)]
        if folder.is_dir()
        else []
    )
    return sorted(checkpoint_paths, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which the checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    scaler: GradScaler | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Restore weights, optimizers, loss scaling and random states in place; return the saved ``state``.

    Raises:
        InputError: a file is damaged or missing, or the checkpoint belongs to another model.
    """
    _verify(folder)
    try:
        state = _read_state(folder)
        file = open_safetensors(folder / "weights.safetensors", f"{folder}: the checkpoint is damaged")
        saved_tensors, tensors = file.tensors(), trained_tensors(model)
        if saved_tensors.keys() != tensors.keys():
            first = min(saved_tensors.keys() ^ tensors.keys())
            raise InputError(f"{folder}: made by another model: {first} is not in both")
        for name, tensor in tensors.items():
            saved = saved_tensors[name]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise InputError(
                    f"{folder}: {name} is {list(saved.shape)} {saved.dtype} in the checkpoint, "
                    f"{list(tensor.shape)} {tensor.dtype} in this model"
                )
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                local(tensor).copy_(piece_of(file.load(name), tensor))
            else:
                file.load_into(name, tensor)
        saved_state = torch.load(folder / "optimizer.pt", weights_only=True)
        scaling, optimizer_states = saved_state["scaler"], saved_state["optimizers"]
        if len(optimizer_states) != len(optimizers):
            raise ValueError(
                f"optimizer.pt: expected {len(optimizers)} optimizers, got {len(optimizer_states)}"
            )
        _set_random_states(saved_state["rng"], device)
    except InputError:
        raise
    # The files are damaged. Only other programs can cause this: a killed save leaves no damaged checkpoint.
    except Exception as error:
        raise _damaged(folder, f"({type(error).__name__}: {error})") from None
    try:
        for optimizer, optimizer_state in zip(optimizers, optimizer_states, strict=True):
            optimizer.load_state_dict(optimizer_state)
        if scaler is not None and scaling:
            scaler.load_state_dict(scaling)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _damaged(folder, f"(optimizer.pt: {type(error).__name__}: {error})") from None
    return state


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _verify(folder: Path) -> None:
    """Compare each file of a checkpoint with its checksum; raise InputError for the first that differs."""
    record = folder / CHECKSUMS
    if not record.exists():
        return
    try:
        sums = json.loads(record.read_text("utf-8"))
        if not isinstance(sums, dict) or not sums:
            raise ValueError("expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, f"({CHECKSUMS}: {error})") from None
    for name, expected in sums.items():
        try:
            received = _checksum(folder / name)
        except (OSError, ValueError) as error:
            raise _damaged(folder, f"({name}: {error})") from None
        if received != expected:
            raise _damaged(folder, f"({name}: expected the checksum {expected}, got {received})")


def _read_state(folder: Path) -> dict[str, Any]:
    state = json.loads((folder / "state.json").read_text("utf-8"))
    if not isinstance(state, dict) or state.get("step") != step_of(folder) or isinstance(state["step"], bool):
        raise ValueError(f"state.json: expected the step {step_of(folder)}")
    for name in ("val_loss", "best_val_loss"):
        if isinstance(state.get(name), bool) or not isinstance(state.get(name), (int, float, type(None))):
            raise ValueError(f"state.json: {name}: expected a number or null, got {state[name]!r}")
    return state


def _damaged(folder: Path, why: str) -> InputError:
    """Return the error of a damaged checkpoint, which names the step from which the run can continue."""
    steps = [step_of(checkpoint) for checkpoint in checkpoints(folder.parents[1])]
    earlier = [step for step in steps if step < step_of(folder)]
    remedy = f"continue from step {earlier[-1]}" if earlier else "begin again"
    return InputError(f"{folder}: the checkpoint is damaged {why}; remove it to {remedy}")

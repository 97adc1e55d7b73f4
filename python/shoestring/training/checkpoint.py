"""Checkpoints that are whole or absent, and from which a run continues bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.data.errors import InputError
from shoestring.data.files import PARTIAL, atomic_directory

KEEP = 2  # the newest, and the one before it


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes; tied weights appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Write ``run/checkpoints/step-N``: weights, optimizer, random state, and ``state`` as JSON; keep the newest two.

    The folder is filled under a temporary name, synced to the disk and renamed, so that a kill leaves the old one.
    """
    from safetensors.torch import save_file

    folder = run / "checkpoints" / f"step-{step:08d}"
    with atomic_directory(folder) as partial:
        save_file(
            {name: tensor.contiguous() for name, tensor in trained_tensors(model).items()},
            partial / "weights.safetensors",
        )
        with open(partial / "optimizer.pt", "wb") as file:  # given a path, torch.save hides what the disk said
            torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, file)
        (partial / "state.json").write_text(json.dumps({"step": step, **state}))
    for old in checkpoints(run)[:-KEEP]:  # renamed first: a kill while removing leaves nothing that looks complete
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)), ignore_errors=True)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    return sorted(p for p in folder.glob("step-*") if not p.name.endswith(PARTIAL)) if folder.is_dir() else []


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights, optimizer and random state back in place; return the saved ``state`` with its step."""
    from safetensors import safe_open

    try:
        with safe_open(folder / "weights.safetensors", "pt") as stored, torch.no_grad():
            tensors = trained_tensors(model)
            names = set(stored.keys())
            if names != set(tensors):
                first = sorted(names ^ set(tensors))[0]
                raise InputError(f"{folder}: made by another model: {first} is not in both")
            for name, tensor in tensors.items():
                saved = stored.get_tensor(name)
                if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise InputError(
                        f"{folder}: {name} is {list(saved.shape)} {saved.dtype} in the checkpoint, "
                        f"{list(tensor.shape)} {tensor.dtype} in this model"
                    )
                tensor.copy_(saved)
        saved_state = torch.load(folder / "optimizer.pt", weights_only=True)
        state = json.loads((folder / "state.json").read_text())
    except InputError:
        raise
    except Exception as error:  # damaged from outside: none of this is left behind by a kill
        raise InputError(
            f"{folder}: the checkpoint is damaged ({type(error).__name__}: {error}); remove it to use the one before"
        ) from None
    optimizer.load_state_dict(saved_state["optimizer"])
    torch.set_rng_state(saved_state["rng"])
    return state

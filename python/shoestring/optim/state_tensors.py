"""States as tensors, which C++ and files take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def as_tensor(value: object) -> Tensor | None:
    """Return a value as the tensor that a file has for it; None if the file has it as JSON."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, (list, tuple)) and value and all(type(number) is float for number in value):
        return torch.tensor(value, dtype=torch.float64)
    return None


def state_tensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries of a state dict as tensors."""
    tensors = {name: as_tensor(value) for name, value in state_dict.items()}
    return {name: torch.as_tensor(state_dict[name]) if t is None else t for name, t in tensors.items()}

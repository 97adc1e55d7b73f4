"""Memory of this process, and where it went."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.storages import storages


def _status(key: str) -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_bytes() -> int:
    """High-water mark of the resident set of the whole process, in bytes."""
    peak = _status("VmHWM:")
    if peak is None:  # macOS counts bytes, other systems kibibytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def resident_bytes() -> int:
    """Resident set of the process now, in bytes (the peak, where the system does not tell the present value)."""
    return _status("VmRSS:") or peak_bytes()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``: tied weights and views count once."""
    return sum(storages(tensors).values())


def _state_tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _state_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _state_tensors(item)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer keeps between steps."""
    return storage_bytes(_state_tensors(optimizer.state_dict()["state"]))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, and of the scales that bitsandbytes keeps outside of both."""
    states = [getattr(p, "quant_state", None) for p in model.parameters()]
    scales = [state.absmax for state in states if state is not None]
    return storage_bytes([*model.parameters(), *model.buffers(), *scales])


class SavedActivations:
    """Counts the bytes that autograd keeps for the backward pass of what runs inside the block (weights left out)."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = storages([*model.parameters(), *model.buffers()])
        self._seen: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._seen |= {
            address: size for address, size in storages([tensor]).items() if address not in self._weights
        }
        return tensor

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())


@dataclass
class Part:
    """One bar of the memory chart."""

    name: str
    formula: str
    expected: int | None  # bytes by the formula, where there is one
    measured: int  # bytes


def import_models() -> None:
    """Import what every causal model needs, so that the program's own memory is not counted as the model's."""
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

"""Measure the memory of this process and of the parts of a training run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.model import parse_bytes
from shoestring.core.device import is_asynchronous, is_cuda
from shoestring.core.errors import InputError
from shoestring.core.process_memory import peak_bytes, resident_bytes
from shoestring.core.storages import storages, tensors_in
from shoestring.optim.base import LowMemoryOptimizer


def _allocator(device: torch.device) -> dict[str, int]:
    """Return what the allocator of an accelerator reports; nothing for the CPU, or if it keeps no figures."""
    if not is_asynchronous(device):
        return {}
    try:
        return {
            "device": torch.accelerator.memory_allocated(device),
            "device_peak": torch.accelerator.max_memory_allocated(device),
            "device_reserved": torch.accelerator.memory_reserved(device),
        }
    except RuntimeError:  # the allocator of a backend need not be one of PyTorch's caching allocators
        return {}


def usage(device: torch.device) -> dict[str, int]:
    """Return the memory of this process, and what the allocator of an accelerator reports, in bytes.

    Keys: ``rss`` and ``peak`` of the process; for an accelerator ``device`` (allocated now), ``device_peak``
    and ``device_reserved`` (held by the allocator), unless its backend keeps no such figures.
    """
    return {"rss": resident_bytes(), "peak": peak_bytes(), **_allocator(device)}


def utilization(device: torch.device) -> dict[str, int]:
    """Return the share of the last second in which a CUDA device ran kernels, in percent.

    The dictionary is empty for other devices, and if nvidia-ml-py is not installed or has no driver.
    """
    if not is_cuda(device):
        return {}
    try:
        return {"device_utilization": torch.cuda.utilization(device)}
    except (ModuleNotFoundError, RuntimeError, OSError):
        return {}


def in_use(device: torch.device) -> int:
    """Return the memory in use on a device: the allocator's figure, or else the process's resident memory."""
    allocated = _allocator(device)
    return allocated["device"] if allocated else resident_bytes()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of ``tensors``; tied weights and views count once."""
    return sum(storages(tensors).values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state tensors."""
    if isinstance(optimizer, LowMemoryOptimizer) and optimizer._all_ranks is not None:
        return storage_bytes(tensors_in(dict(optimizer.state)))  # the part of this process
    return storage_bytes(tensors_in(optimizer.state_dict()["state"]))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters, buffers and, for bitsandbytes layers, quantisation scales.

    Weights that are away from the device count, too.
    """
    states = [getattr(p, "quant_state", None) for p in model.parameters()]
    states += [getattr(state, "state2", None) for state in states]  # the state of quantised scales
    scales = [
        scale
        for state in states
        if state is not None
        for scale in (state.absmax, getattr(state, "offset", None))
    ]
    return storage_bytes(
        [*model.parameters(), *model.buffers(), *(scale for scale in scales if scale is not None)]
    )


class SavedActivations:
    """Count the bytes that autograd saves for backward inside the ``with`` block, without weights."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = storages([*model.parameters(), *model.buffers()])
        self._seen: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._seen |= {key: size for key, size in storages([tensor]).items() if key not in self._weights}
        return tensor

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())


def import_models() -> None:
    """Import transformers' modules for causal models now, so that they do not count as the model's memory."""
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def parse_budget(text: str | None, option: str = "memory-budget") -> int | None:
    """Return the value of an option such as --memory-budget in bytes, or None if there is no budget.

    Raises:
        InputError: ``text`` is not a size.
    """
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"--{option}: {error}") from None


def kept_bytes(keep: str) -> int:
    """Return the value of --keep in bytes; raise InputError if it is no size."""
    return 0 if keep.strip() == "0" else parse_budget(keep, "keep") or 0

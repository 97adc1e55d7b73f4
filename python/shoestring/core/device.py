"""Tell devices apart: the CPU, the devices whose kernels run later on streams, and among these CUDA.

No other module of the library asks whether a tensor is on CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def is_asynchronous(device: torch.device) -> bool:
    """Return whether kernels on the device run after the operator that starts them has returned.

    This holds for every device except the CPU and "meta". The host has to wait before it reads a result.
    """
    return device.type not in ("cpu", "meta")


def is_cuda(device: torch.device) -> bool:
    """Return whether the device is a GPU that PyTorch calls "cuda"."""
    return device.type == "cuda"


def default_device() -> torch.device:
    """Return PyTorch's accelerator without an index, or the CPU if this machine has no accelerator."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until all streams of the device have finished. Return at once for the CPU."""
    if is_asynchronous(device):
        torch.accelerator.synchronize(device)


def forked_rng() -> AbstractContextManager[Any]:
    """Return a context that restores the random state of the CPU and of all devices that are in use."""
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    if accelerator is None or not getattr(module, "is_initialized", bool)():
        return torch.random.fork_rng(devices=())
    devices = range(torch.accelerator.device_count())
    return torch.random.fork_rng(devices=devices, device_type=accelerator.type)

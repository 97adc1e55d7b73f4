"""Choose the device of a run, and the precision of its weights and matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shoestring.core.device import is_cuda
from shoestring.core.errors import InputError
from shoestring.training.config import FinetuneConfig, LoopConfig, StepConfig

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_device(name: str) -> torch.device:
    """Return the device that ``--device`` names; an accelerator always has an index.

    "auto" is the current accelerator (CUDA, ROCm, XPU, MPS and others), or the CPU if there is none. PyTorch
    knows the backend of another package by its name from ``import torch`` on, which loads installed backends.

    Raises:
        InputError: this PyTorch does not know the device, or the machine does not have it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if name == "auto":
        if accelerator is None:
            return CPU
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    device = parse_device(name)
    if device.type == "cpu" and device.index in (None, 0):
        return CPU
    found = "cpu"
    if accelerator is not None:
        last = f" to {accelerator.type}:{count - 1}" if count > 1 else ""
        found += f" and {accelerator.type}:0{last}"
        if device.type == accelerator.type:
            index = device.index if device.index is not None else torch.accelerator.current_device_index()
            if index < count:
                return torch.device(device.type, index)
    raise InputError(
        f"--device: expected a device of this machine, which PyTorch {torch.__version__} finds to be {found}; "
        f"got {name}"
    )


def parse_device(name: str) -> torch.device:
    """Return the device with this name, which the machine need not have; raise InputError for another text."""
    try:
        return torch.device(name)
    except RuntimeError:
        raise InputError(
            "--device: expected auto, cpu, cuda, cuda:N or the name of an installed backend of PyTorch, "
            f"got {name}"
        ) from None


def check_precision(config: StepConfig, device: torch.device) -> None:
    """Raise InputError if ``--precision`` and ``--weights`` do not fit together, or do not fit the device."""
    if config.weights != "fp32" and config.precision != "bf16":
        raise InputError(
            f"--weights {config.weights}: expected --precision bf16 with bf16 weights, got --precision "
            f"{config.precision}"
        )
    if config.precision == "tf32" and not is_cuda(device):
        raise InputError(
            f"--precision tf32: expected a CUDA device, which computes in TF32, got {device}; take fp32 or bf16"
        )


def weight_dtype(config: StepConfig) -> torch.dtype:
    """Return the dtype in which trained weights are stored."""
    return torch.float32 if config.weights == "fp32" else torch.bfloat16


def base_dtype(config: StepConfig) -> torch.dtype:
    """Return the dtype in which the frozen weights below an adapter are stored, unless they are quantised.

    It is the dtype of the matrix products.
    """
    return torch.float32 if config.autocast is None else DTYPES[config.autocast]


def model_dtype(config: LoopConfig) -> torch.dtype:
    """Return the dtype in which a model is created or loaded."""
    adapts = isinstance(config, FinetuneConfig) and not config.full
    return base_dtype(config) if adapts else weight_dtype(config)


def autocast(config: StepConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return an autocast context for matrix products in 16 bits, or a null context."""
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[config.autocast])


@contextmanager
def float32_products(config: StepConfig) -> Iterator[None]:
    """Compute fp32 matrix products and convolutions with TF32 for ``--precision tf32``, and exactly otherwise.

    The settings before are restored. They apply to PyTorch and to shoestring's operators, which multiply with
    PyTorch's products. Attention always multiplies fp32 with 22 bits of precision.
    """
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if config.precision == "tf32" else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value

"""Choose the device of a run, and the precision of its weights and matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shoestring.core.device import is_cuda
from shoestring.core.errors import InputError

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")  # of matrix products, the most exact first
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
    devices = "cpu"
    if accelerator is not None:
        last = f" to {accelerator.type}:{count - 1}" if count > 1 else ""
        devices += f" and {accelerator.type}:0{last}"
        if device.type == accelerator.type:
            index = device.index if device.index is not None else torch.accelerator.current_device_index()
            if index < count:
                return torch.device(device.type, index)
    raise InputError(
        f"--device: expected a device of this machine, which PyTorch {torch.__version__} finds to be {devices}; "
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


def check_precision(precision: str, weights: str, device: torch.device) -> None:
    """Raise InputError if ``--precision`` and ``--weights`` do not fit together, or do not fit the device."""
    if weights != "fp32" and precision != "bf16":
        raise InputError(
            f"--weights {weights}: expected --precision bf16 with bf16 weights, got --precision {precision}"
        )
    if precision == "tf32" and not is_cuda(device):
        raise InputError(
            f"--precision tf32: expected a CUDA device, which computes in TF32, got {device}; take fp32 or bf16"
        )


def weight_dtype(weights: str) -> torch.dtype:
    """Return the dtype in which trained weights are stored, from the value of ``--weights``."""
    return torch.float32 if weights == "fp32" else torch.bfloat16


def base_dtype(products: str | None) -> torch.dtype:
    """Return the dtype in which the frozen weights below an adapter are stored, unless they are quantised.

    It is the dtype of the matrix products, of which ``products`` is the 16-bit one, if there is one.
    """
    return torch.float32 if products is None else DTYPES[products]


def autocast(products: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return an autocast context for matrix products in 16 bits, "bf16" or "fp16", or else a null context.

    Its cache is off. It would hold a 16-bit copy of every weight until the end of forward, also of blocks that are
    computed again in backward.
    """
    if products is None:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[products], cache_enabled=False)


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Compute fp32 matrix products and convolutions with TF32, or exactly.

    The settings before are restored. They apply to PyTorch and to shoestring's operators, which multiply with
    PyTorch's products. Attention always multiplies fp32 with 22 bits of precision.
    """
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value

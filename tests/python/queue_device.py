"""An asynchronous device for tests, made of threads (tests/cpp/data/queue_device.cpp)."""

import functools

import torch

from build_folder import library


@functools.cache
def queue_device() -> torch.device:
    """Register the device with PyTorch, and return it."""
    torch.ops.load_library(str(library("libqueue_device.so")))
    device: torch.device = torch.ops.shoestring_tests.install_queue_device()
    return device


def set_copy_seconds(seconds: float) -> None:
    """Make each copy to the device take this long, as a slow link would."""
    queue_device()
    torch.ops.shoestring_tests.set_copy_seconds(seconds)


def set_event_times(exist: bool) -> None:
    """Decide whether events of the device tell the time between them."""
    queue_device()
    torch.ops.shoestring_tests.set_event_times(exist)


def compute(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return a tensor to which the device copies ``x``, after ``seconds`` of other work."""
    result: torch.Tensor = torch.ops.shoestring_tests.queue_compute(x, seconds)
    return result

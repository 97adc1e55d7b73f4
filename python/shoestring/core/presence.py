"""Bring the weights of a module that are away from its device, for code that reads them outside of its block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

# Attribute of each module of a block with offloaded weights: returns a context in which they are on the device.
PRESENT = "_shoestring_weights_present"


def weights_present(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the weights of a module are on its device; weights are only read in it."""
    present: Callable[[], AbstractContextManager[None]] = module.__dict__.get(PRESENT, nullcontext)
    return present()

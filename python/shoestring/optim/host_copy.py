"""Copies of tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoestring.core.device import is_asynchronous
from shoestring.optim.sharded import is_dtensor


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which is pinned for a GPU. It is complete when the current stream is.

    The copy of a DTensor is on its device.
    """
    if is_dtensor(tensor):
        return tensor.detach().clone()
    pinned = is_asynchronous(tensor.device)
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return host.copy_(tensor.detach(), non_blocking=pinned)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested dicts, lists and tuples, with ``change`` applied to each tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree

"""Copies in host memory of tensors and of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoestring.core.device import is_asynchronous
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.sharded import is_dtensor, local


class HostCopy:
    """Copies tensors, and the states of optimizers and other objects with ``state_dict``, to restore them.

    The copies are pinned for a GPU, and complete when the current stream is. ``restore()`` may be called several
    times.
    """

    def __init__(self, tensors: Iterable[Tensor], objects: Iterable[Any]) -> None:
        self._restores = [_restore_of(each) for each in objects]
        self._tensors = [(tensor, _on_host(local(tensor.detach()))) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Make tensors and states what they were, bit for bit."""
        for restore in self._restores:
            restore()
        for tensor, host in self._tensors:
            local(tensor.detach()).copy_(host, non_blocking=True)


def _restore_of(each: Any) -> Callable[[], object]:
    if isinstance(each, LowMemoryOptimizer) and each._all_ranks is not None:
        return each._copy_of_part()
    state = tree_map_only(Tensor, _on_host, each.state_dict())
    # Objects may keep the tensors that they load, so they get copies.
    return lambda: each.load_state_dict(tree_map_only(Tensor, Tensor.clone, state))


def _on_host(tensor: Tensor) -> Tensor:
    if is_dtensor(tensor):
        return tensor.detach().clone()
    pinned = is_asynchronous(tensor.device)
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return host.copy_(tensor.detach(), non_blocking=pinned)

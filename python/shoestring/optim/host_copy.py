"""Copies in host memory of tensors and of states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shoestring.core.device import is_asynchronous
from shoestring.core.dtensors import is_dtensor
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.interrupts import Uninterrupted
from shoestring.optim.sharded import local
from shoestring.optim.torch_files import load_exactly


class HostCopy:
    """Copies tensors, and the states of optimizers and other objects with ``state_dict``, to restore them.

    Of ``modules``, the buffers are copied. Forward may assign a new tensor to a buffer, so ``restore()`` also puts the
    tensor that was copied back into its place. The copies are pinned for a GPU, and complete when the current stream is.
    ``restore()`` may be called several times.
    """

    def __init__(
        self, tensors: Iterable[Tensor], objects: Iterable[Any], modules: Iterable[nn.Module] = ()
    ) -> None:
        self._restores = [_restore_of(each) for each in objects]
        owners = {id(m): m._buffers for module in modules for m in module.modules()}
        self._buffers = [(owner, dict(owner)) for owner in owners.values()]
        buffers = [buffer for _, before in self._buffers for buffer in before.values() if buffer is not None]
        every = {id(tensor): tensor for tensor in [*tensors, *buffers]}
        self._tensors = [(tensor, _on_host(local(tensor.detach()))) for tensor in every.values()]

    def restore(self) -> None:
        """Make tensors and states what they were, bit for bit.

        If an object refuses its state, everything else is restored before the error is raised.
        """
        for owner, before in self._buffers:
            owner.update(before)
        call_all([*self._restores, *(partial(_copy_back, tensor, host) for tensor, host in self._tensors)])


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every step, also after one has raised an error, and raise the first error at the end.

    SIGINT and SIGTERM wait meanwhile. A warning tells of each further error.
    """
    errors: list[BaseException] = []
    with Uninterrupted():
        for step in steps:
            try:
                step()
            except BaseException as error:
                errors.append(error)
    for other in errors[1:]:
        warnings.warn(f"Another step failed, too: {type(other).__name__}: {other}", stacklevel=3)
    if errors:
        raise errors[0]


@torch.no_grad()
def _copy_back(tensor: Tensor, host: Tensor) -> None:
    local(tensor.detach()).copy_(host, non_blocking=True)


def _restore_of(each: Any) -> Callable[[], object]:
    """Copy the state of an object to the host; return a function that restores it."""
    if isinstance(each, LowMemoryOptimizer) and each._all_ranks is not None:
        return each._copy_of_part()
    state = _copied(each.state_dict(), _on_host)
    load = partial(load_exactly, each) if isinstance(each, Optimizer) else each.load_state_dict
    # Objects may keep what they load, so they get copies.
    return lambda: load(_copied(state, Tensor.clone))


def _copied(state: Any, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """Return a state dict that shares nothing with ``state``; ``copy_of`` copies its tensors."""
    copied = tree_map(lambda leaf: copy_of(leaf) if isinstance(leaf, Tensor) else deepcopy(leaf), state)
    if hasattr(state, "_metadata"):  # the versions of the modules in a Module's state dict
        copied._metadata = state._metadata
    return copied


def _on_host(tensor: Tensor) -> Tensor:
    if is_dtensor(tensor):
        return tensor.detach().clone()
    pinned = is_asynchronous(tensor.device)
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return host.copy_(tensor.detach(), non_blocking=pinned)

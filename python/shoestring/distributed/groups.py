"""Process groups: their names in C++, and what all processes of a group have in common."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoestring._load import LIBRARIES
from shoestring.core.stacks import EXCHANGE

TIMEOUT = timedelta(minutes=10)  # limit of collectives in groups that this package starts


@functools.cache
def operators() -> Any:
    """Load libshoestring_distributed.so, and return the namespace of its operators."""
    torch.ops.load_library(str(LIBRARIES / "libshoestring_distributed.so"))
    return torch.ops.shoestring


def group_or_default(group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return the group, or the group of all processes.

    Raises:
        RuntimeError: no process group was initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{caller}: expected an initialised process group, received none; call "
            "torch.distributed.init_process_group() in a program that torchrun has started"
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen


def start_group(backend: str) -> tuple[int, int]:
    """Start the group of all processes that torchrun has started; return this process's rank and their number.

    Raises:
        ValueError or RuntimeError: the environment is not that of torchrun, or the others do not come.
    """
    from torch._C._distributed_c10d import PrefixStore  # a PyTorch without c10d has neither
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
    # torchrun keeps its store when it starts processes again, with the addresses of those that have ended.
    attempt = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=count, timeout=TIMEOUT)
    return rank, count


def backends(device: str) -> str:
    """Return the backends of a group for tensors of the CPU and of this type of device."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def name_of(group: dist.ProcessGroup) -> str:
    name: str = group.group_name
    return name


def name_collectives(*groups: dist.ProcessGroup) -> Callable[[], None]:
    """Let errors of collectives name the ranks and the collective; return a function that undoes it.

    All ranks must call it between the same collectives. See ``NamedBackend`` in C++.
    """
    numbers = {
        name: operators()._name_collectives(name) for name in {name_of(group): None for group in groups}
    }

    def undo() -> None:
        for name, number in numbers.items():
            operators()._remove_names(name, number)

    atexit.register(undo)  # the threads that listen end before the store does
    return undo


def survivors(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the ranks that live after a collective of a group has failed, the same on all of them.

    Ranks that do not answer within two seconds are left out. To go on without the others, make a group of these
    ranks: ``dist.new_group(ranks, use_local_synchronization=True)``.

    Args:
        group: the processes; None for all. ``DiLoCo``, ``shard`` or ``parallelize`` must have used it.

    Returns:
        the ranks in the group of all processes, as ``dist.new_group`` takes them.

    Raises:
        ValueError: nothing of this package has used the group, or it has one process.
        RuntimeError: no collective of the group has failed, the process that holds the store has ended, or the
            others have left this rank out.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> optimizer = shoestring.optim.AdamW(torch.nn.Linear(64, 8).parameters())
        >>> diloco, group = shoestring.distributed.DiLoCo(optimizer), None
        >>> try:
        ...     averaged = diloco.step()
        ... except RuntimeError:  # a process has ended
        ...     ranks = shoestring.distributed.survivors(group)
        ...     group = dist.new_group(ranks, use_local_synchronization=True)
        ...     diloco.regroup(group)
        >>> dist.destroy_process_group()
    """
    group = group_or_default(group, "survivors")
    return [dist.get_global_rank(group, rank) for rank in operators()._survivors(name_of(group))]


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the tensors of which a tensor of a subclass such as QuantizedTensor consists."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor.detach()
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(f"{name}.{inner}", getattr(tensor, inner))


def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks, but those of experts that the ranks have split.

    Args:
        module: the module, with the same parameters and buffers on all ranks.
        group: the processes; None for all.

    Raises:
        RuntimeError: parameters differ in number, name, shape or dtype. All ranks raise, and name the first
            that differs.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shoestring.distributed.broadcast_module(torch.nn.Linear(4, 4))
        >>> dist.destroy_process_group()
    """
    group = group_or_default(group, "broadcast_module")
    own = tuple(f"{name}." if name else "" for name, m in module.named_modules() if EXCHANGE in m.__dict__)
    every = chain(module.named_parameters(), module.named_buffers())
    named = [(name, tensor) for name, tensor in every if not name.startswith(own)]
    tensors = [item for name, tensor in named for item in plain_tensors(name, tensor)]
    operators()._broadcast_tensors(
        [tensor for _, tensor in tensors], [name for name, _ in tensors], name_of(group), "broadcast_module"
    )


def mean_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean of a tensor over the ranks.

    Divide the sum of a rank's token losses by the mean number of tokens of a rank. The gradients, which are
    averaged over the ranks, are then those of the mean over all tokens of all ranks.

    Args:
        tensor: a tensor of a floating-point dtype, of the same shape on all ranks. It does not change.
        group: the processes; None for all.

    Raises:
        TypeError: the tensor has no floating-point dtype.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shoestring.distributed.mean_over_ranks(torch.tensor([3.0]))
        tensor([3.])
        >>> dist.destroy_process_group()
    """
    if not tensor.is_floating_point():
        raise TypeError(f"mean_over_ranks: tensor: expected a floating-point dtype, received {tensor.dtype}")
    group = group_or_default(group, "mean_over_ranks")
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total.div_(dist.get_world_size(group))

"""Split the steps of an optimizer over processes: ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoestring.core.dtensors import is_dtensor
from shoestring.distributed.all_ranks import AllRanks
from shoestring.distributed.groups import group_or_default, name_collectives, name_of, operators
from shoestring.optim.base import LowMemoryOptimizer

BUCKET_BYTES = 25 << 20


def shard(
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
    *,
    gradients: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    find_unused: bool = False,
    compress: str | None = None,
) -> None:
    """Split the steps of an optimizer over processes: each keeps and steps a part of the optimizer's state.

    A part is whole blocks of 256 elements in the order of the parameters; on a GPU, and in optimizers that
    step whole parameters, it is whole parameters. Each step ends with a copy of every part to all processes.
    The weights are bit for bit those of one process with the same gradients. Call it before the first step.

    Without ``gradients``, the gradients must be the same on all ranks: those of DistributedDataParallel
    (ZeRO-1, arXiv 1910.02054). With it (ZeRO-2), backward sends each gradient to the rank that steps it, and
    frees it. Call ``broadcast_module`` first. ``.grad`` is None after backward; clip with the optimizer's
    ``max_grad_norm``. ``optimizer.accumulate()`` adds micro-batches up on the rank, without sending anything.
    Without it each backward sends its gradients, which takes less memory.

    Args:
        optimizer: an optimizer of ``shoestring.optim`` that has not stepped, without ``step_in_backward``. With
            ``offload="stream"`` or ``"nvme:DIR"``, the part of each process is away. All ranks must call its ``state_dict()``, or ``consolidate_state_dict()``
            before rank 0 calls ``state_dict()``.
        group: the processes; None for all.
        gradients: whether the gradients are split.
        bucket_bytes: split gradients are sent in buckets of about this size, while backward computes the
            others.
        find_unused: whether a backward may leave parameters without a gradient. Zeros are sent for them.
        compress: "8bit", "4bit" or "1bit", the bits in which split gradients are sent, or None; see
            ``shoestring.parallelize``.

    Errors of collectives of the group name the ranks and the collective from then on.

    Raises:
        TypeError: the optimizer is not of ``shoestring.optim``, or is one of its low-rank optimizers.
        ValueError: the optimizer has DTensor parameters, which are split already, or ``compress`` is unknown
            or given without ``gradients``.
        RuntimeError: no process group was initialised, or the optimizer has state, ``offload="cpu"``, or
            parameters that are not contiguous.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(32, 8)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> shoestring.distributed.shard(optimizer, gradients=True)
        >>> model(torch.randn(4, 32)).square().mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    name_collectives(split_steps(optimizer, group, gradients, bucket_bytes, find_unused, compress))


def split_steps(
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
    gradients: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    find_unused: bool = False,
    compress: str | None = None,
) -> dist.ProcessGroup:
    """Split the steps of an optimizer as ``shard`` does; return the group."""
    if not isinstance(optimizer, LowMemoryOptimizer):
        raise TypeError(
            "shard: optimizer: expected an optimizer of shoestring.optim with state for each parameter, such as AdamW, "
            f"received {type(optimizer).__name__}"
        )
    if any(is_dtensor(p) for p in optimizer._all_params()):
        raise ValueError(
            "shard: optimizer: expected plain parameters, received DTensors, which are split already"
        )
    processes = group_or_default(group, "shard")
    optimizer._split(
        lambda core: operators()._shard(
            core, name_of(processes), gradients, bucket_bytes, find_unused, compress or "none"
        ),
        AllRanks(processes),
        gradients,
    )
    # Python frees attributes in the order in which they were set, so the core is not the last to refer to the group.
    # A core would free the group with Python's lock, for which a thread of Gloo may wait while the group waits for it.
    optimizer._group = processes
    return processes

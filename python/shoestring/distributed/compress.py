"""Gradients in few bits, for DistributedDataParallel and ``fully_shard``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.distributed.groups import name_of, operators

BITS = {"8bit": 8, "4bit": 4, "1bit": 1}
POWERSGD_RANK = 4
POWERSGD_PLAIN_STEPS = 10  # steps whose gradients are not compressed

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def compressor(group: dist.ProcessGroup, compress: str) -> Any:
    """Return a Compressor of C++, which owns the residuals of this process."""
    operators()
    return torch.classes.shoestring.Compressor(name_of(group), BITS[compress])


def all_reduce_hook(core: Any) -> Hook:
    """Return a hook of DistributedDataParallel that averages gradients through a Compressor."""

    def shoestring_compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        reduced = core.all_reduce(bucket.buffer(), bucket.parameters(), bucket.index(), bucket.is_last())
        value: torch.futures.Future[Tensor] = reduced.then(lambda future: future.value())
        return value

    return shoestring_compress_hook


def powersgd_hook(group: dist.ProcessGroup) -> Hook:
    """Return PyTorch's PowerSGD (arXiv 1905.13727) of rank 4 as a hook of DistributedDataParallel."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    powersgd_state = powerSGD_hook.PowerSGDState(
        process_group=group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_PLAIN_STEPS
    )

    def shoestring_powersgd_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        reduced: torch.futures.Future[Tensor] = powerSGD_hook.powerSGD_hook(powersgd_state, bucket)
        # The hook issues its second and third collective from the callback of the one before. On Gloo,
        # callbacks run in threads, so ranks would issue the collectives of two buckets in different orders.
        if bucket.buffer().device.type == "cpu":
            reduced.wait()
        return reduced

    return shoestring_powersgd_hook


def compress_reduce_scatter(core: Any, unit: Any, number: int) -> None:
    """Let a unit of ``fully_shard`` reduce and scatter its gradients through a Compressor."""
    unit.set_custom_reduce_scatter(CompressedReduceScatter(core, number))


def compress_all_reduce(core: Any, unit: Any, number: int) -> None:
    """Let a unit of ``fully_shard`` average its part of the gradients over replicas through a Compressor."""

    def shoestring_compress_shards(gradients: Tensor) -> None:
        core.all_reduce(gradients, [], number, True).wait()

    unit.set_all_reduce_hook(shoestring_compress_shards)


class CompressedReduceScatter:
    """Reduce-scatter of ``fully_shard`` through a Compressor."""

    def __init__(self, core: Any, key: int) -> None:
        self._core, self._key = core, key

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(f"compress: expected a mean or a sum of gradients, received {op}")
        self._core.reduce_scatter(output_tensor, input_tensor, self._key)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(dist.get_world_size(group))

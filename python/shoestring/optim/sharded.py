"""DTensor parameters (FSDP2, HSDP, tensor parallelism): local shards, and norms over all shards.

An optimizer steps the shards of its process. The gradient norm for clipping is all-reduced over the
dimensions of the device mesh that split the parameter. Random bits depend on the index of the shard only, so
that replicas of a shard on several processes stay equal.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shards:
    """How DTensor parameters are split, and which shard this process holds.

    Processes that hold replicas of a shard have equal ``Shards`` objects, and so derive equal seeds.
    """

    mesh: Any  # DeviceMesh
    placements: tuple[Any, ...]
    piece: int  # index of this process's shard among the shards of the parameter

    @property
    def dims(self) -> list[int]:
        """The dimensions of the device mesh that split the parameter."""
        return [dim for dim, placement in enumerate(self.placements) if not placement.is_replicate()]


def is_dtensor(tensor: object) -> "TypeIs[DTensor]":
    """Return whether the object is a DTensor; always False if torch has no distributed package."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor. Return any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_gradient(param: Tensor) -> Tensor | None:
    """Return the part of a parameter's gradient that belongs to this process's shard of the parameter."""
    grad = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    pieces: Any = grad
    if pieces.placements != param.placements:  # redistribute is a collective operation
        pieces = pieces.redistribute(placements=param.placements)
    result: Tensor = pieces.to_local()
    return result


def gradient_in_hook(param: Tensor) -> Tensor:
    """In a gradient hook, return the gradient of this process's shard, safe to read on the current stream.

    FSDP2 calls gradient hooks on its own stream, and may still be copying the gradient to the CPU.
    """
    grad = local_gradient(param)
    assert grad is not None
    if is_dtensor(param) and grad.device.type != param.device_mesh.device_type:
        torch.accelerator.current_stream().synchronize()
    elif is_dtensor(param) and grad.is_cuda:
        # The gradient was allocated on another stream, which may reuse the memory once it is freed.
        grad.record_stream(torch.cuda.current_stream(grad.device))
    return grad


def shards(param: Tensor) -> Shards | None:
    """Return how a DTensor is split. Return None for any other tensor."""
    if not is_dtensor(param):
        return None
    found = Shards(param.device_mesh, tuple(param.placements), 0)
    piece = 0
    coordinate: Any = param.device_mesh.get_coordinate()
    for dim in found.dims:
        piece = piece * param.device_mesh.size(dim) + coordinate[dim]
    return Shards(found.mesh, found.placements, piece)


def seed_of(seed: int, piece: Shards | None) -> int:
    """Return a different seed for each shard.

    Operators count elements from the start of their shard, so equal seeds would repeat random bits.
    """
    mixed = seed + (0 if piece is None else piece.piece) * 0x9E3779B97F4A7C15
    return (mixed + (1 << 63)) % (1 << 64) - (1 << 63)  # wrap the seed to the range of int64


def whole_norm(norm: Tensor, piece: Shards | None) -> Tensor:
    """Return the norm over all shards of a tensor from the norm of this process's shard.

    This is a collective operation if the tensor is split.
    """
    if piece is None or not piece.dims:
        return norm
    square = norm.to(piece.mesh.device_type).square()
    for dim in piece.dims:
        torch.distributed.all_reduce(square, group=piece.mesh.get_group(dim))
    return square.sqrt()


def reduced_after_hooks(params: Iterable[Tensor]) -> bool:
    """Return whether DistributedDataParallel wraps these parameters.

    DistributedDataParallel all-reduces gradients after the gradient hooks have run. A parameter holds no
    reference to its wrapper, so this function inspects every live object. The optimizer calls it once, and
    only distributed programs pay for it.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.nn.parallel import DistributedDataParallel

    wanted = {id(p) for p in params if not is_dtensor(p)}
    replicated = (
        [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)] if wanted else []
    )
    return any(id(p) in wanted for module in replicated for p in module.parameters())


def as_dtensor(value: Tensor, param: "DTensor", shape: tuple[int, ...]) -> "DTensor":
    """Wrap this process's shard as a DTensor of global shape ``shape`` that is split like the parameter."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=size, stride=stride
    )


def piece_of(value: Tensor, param: "DTensor") -> Tensor:
    """Split a tensor or a DTensor like the parameter, and return this process's shard."""
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(value):
        if value.device_mesh == param.device_mesh:
            result: Tensor = value.redistribute(placements=param.placements).to_local()
            return result
        value = value.full_tensor()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()

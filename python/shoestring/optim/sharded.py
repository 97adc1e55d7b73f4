"""DTensor parameters (FSDP2, HSDP, tensor parallelism): local shards, and norms over all shards.

An optimizer steps the shards of its process. The gradient norm for clipping is all-reduced over the
dimensions of the device mesh that split the parameter. Random bits depend on the index of the shard only, so
that replicas of a shard on several processes stay equal. Both happen in the C++ core.
"""

import gc
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.device import is_asynchronous
from shoestring.core.dtensors import is_dtensor

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

    @property
    def groups(self) -> list[str]:
        """The names of the process groups over which the parameter is split."""
        return [self.mesh.get_group(dim).group_name for dim in self.dims]


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
    elif is_dtensor(param) and is_asynchronous(grad.device):
        # The gradient was allocated on another stream, which may reuse the memory once it is freed.
        grad.record_stream(torch.accelerator.current_stream(grad.device))
    return grad


def shards(param: Tensor) -> Shards | None:
    """Return how a DTensor is split. Return None for any other tensor."""
    if not is_dtensor(param):
        return None
    split = Shards(param.device_mesh, tuple(param.placements), 0)
    piece = 0
    coordinate: Any = param.device_mesh.get_coordinate()
    for dim in split.dims:
        piece = piece * param.device_mesh.size(dim) + coordinate[dim]
    return Shards(split.mesh, split.placements, piece)


def row_begins(param: "DTensor", split: Shards) -> list[int]:
    """Return the element at which the rows of each process begin, and the number of elements.

    Return an empty list if the parameter is not split by rows over one dimension of its mesh.
    """
    dims = split.dims
    if (
        len(dims) != 1
        or type(split.placements[dims[0]]).__name__ != "Shard"
        or not split.placements[dims[0]].is_shard(0)
    ):
        return []
    ranks, rows = split.mesh.size(dims[0]), param.shape[0]
    row = math.prod(param.shape[1:])
    return [min(rank * math.ceil(rows / ranks), rows) * row for rank in range(ranks + 1)]


class Aliases:
    """For each DTensor, this process's shard as a tensor that C++ steps."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}

    def stepped(self, param: Tensor) -> Tensor:
        """Return the tensor that C++ steps: the parameter, or an alias of this process's shard of it."""
        if not is_dtensor(param):
            return param
        shard, alias = local(param), self._of.get(param)
        if alias is None or alias.data_ptr() != shard.data_ptr() or alias.shape != shard.shape:
            alias = self._of[param] = shard.detach()
        return alias.requires_grad_(param.requires_grad)


class Splits(NamedTuple):
    """How processes split parameters, as C++ takes it. The lists are empty if no parameter is a DTensor."""

    groups: list[list[str]]  # the names of the process groups over which each parameter is split
    pieces: list[int]  # the index of this process's shard among the shards of each parameter
    sizes: list[list[int]]  # the shapes of the whole parameters
    begins: list[list[int]]  # the result of row_begins for each parameter
    device: torch.device  # the device type on which the groups communicate


def splits_of(params: Iterable[Tensor]) -> Splits:
    """Return how processes split parameters."""
    splits = Splits([], [], [], [], torch.device("cpu"))
    params = list(params)
    if not any(map(is_dtensor, params)):
        return splits
    for p in params:
        split = shards(p)
        splits.groups.append([] if split is None else split.groups)
        splits.pieces.append(0 if split is None else split.piece)
        splits.sizes.append(list(p.shape))
        splits.begins.append(row_begins(p, split) if is_dtensor(p) and split is not None else [])
        if split is not None:
            splits = splits._replace(device=torch.device(split.mesh.device_type))
    return splits


@contextmanager
def shard_gradients(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Give aliases of DTensors the gradients of their shards. A pair is a parameter and its alias."""
    aliases = []
    for p, stepped in pairs:
        if stepped is not p:
            stepped.grad = local_gradient(p)
            aliases.append(stepped)
    try:
        yield
    finally:
        for alias in aliases:
            alias.grad = None


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
        _at_start(value), param.device_mesh, param.placements, run_check=False, shape=size, stride=stride
    )


def _at_start(value: Tensor) -> Tensor:
    """Return a contiguous tensor on the same memory that lies at the start of a storage of its own.

    copy.deepcopy fails for a DTensor whose shard has a storage offset.
    """
    if value.storage_offset() == 0 or not value.is_contiguous():
        return value
    begin = value.storage_offset() * value.element_size()
    storage = value.untyped_storage()[begin : begin + value.nbytes]
    result: Tensor = torch.empty(0, dtype=value.dtype, device=value.device)
    return result.set_(storage, 0, value.shape, value.stride())


def piece_of(value: Tensor, param: "DTensor") -> Tensor:
    """Split a tensor or a DTensor like the parameter, and return this process's shard."""
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(value):
        if value.device_mesh == param.device_mesh:
            result: Tensor = value.redistribute(placements=param.placements).to_local()
            return result
        value = value.full_tensor()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()

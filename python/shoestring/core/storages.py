"""Find and compare the storages of tensors. A storage that several tensors share counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a dict from an identifier of each distinct storage of the tensors to its size in bytes.

    A tensor of a wrapper subclass, such as a quantised weight, has several storages. Unlike an address, the
    identifier also exists on the meta device, and stays the same when ``offload_weights`` moves a weight.
    """
    untyped = (part.untyped_storage() for part in parts(tensors))
    return {storage._cdata: storage.nbytes() for storage in untyped}


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of ``tensors``: themselves, or those inside a wrapper subclass."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors begin at the same element of the same storage.

    Unlike a comparison of data pointers, this also holds for fake and meta tensors, which have no memory.
    """
    same_storage: bool = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()

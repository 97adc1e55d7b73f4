"""Find and compare the storages of tensors. A storage that several tensors share counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a dict from the address of each distinct storage of the tensors to its size in bytes.

    A tensor of a wrapper subclass, such as a quantised weight, has several storages.
    """
    return dict(pair for tensor in tensors for pair in _storages(tensor))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors begin at the same element of the same storage.

    Unlike a comparison of data pointers, this also holds for fake and meta tensors, which have no memory.
    """
    same_storage: bool = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        storage = tensor.untyped_storage()
        # A storage on the meta device has no data pointer; its attribute _cdata identifies it instead.
        yield (
            storage.data_ptr() or storage._cdata,
            storage.nbytes(),
        )

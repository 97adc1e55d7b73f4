"""Addresses and sizes of the storages behind tensors; a storage that several tensors share counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each distinct storage behind the tensors, by address.

    A wrapper subclass, such as a quantised weight, has several storages.
    """
    return dict(pair for tensor in tensors for pair in _storages(tensor))


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        storage = tensor.untyped_storage()
        # Storages on the meta device have no data pointer; _cdata identifies them.
        yield (
            storage.data_ptr() or storage._cdata,
            storage.nbytes(),
        )

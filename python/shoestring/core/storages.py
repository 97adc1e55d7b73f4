"""Where tensors lie: addresses and sizes, each storage once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the distinct storages behind tensors; a wrapper such as a quantised weight has several."""
    return dict(pair for tensor in tensors for pair in _storages(tensor))


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        storage = tensor.untyped_storage()
        yield (
            storage.data_ptr() or storage._cdata,
            storage.nbytes(),
        )  # on the meta device nothing has an address

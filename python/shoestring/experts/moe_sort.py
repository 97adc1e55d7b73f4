"""The order of tokens by expert, which products of experts need."""

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.kept_calls import kept_call

__all__ = ["MoeSort", "moe_sort"]


class MoeSort(NamedTuple):
    """The order of slots by their experts, int64 tensors.

    A slot is an element of ``index`` by its position in memory order: with index (tokens, top_k), slot s belongs
    to token ``s // top_k``.

    order: (slots): the slots of expert 0, then those of expert 1, and so on; slots without an expert come last.
    inverse: (slots): the place of each slot in ``order``.
    offsets: (experts + 1): the slots of expert e are ``order[offsets[e]:offsets[e + 1]]``.

    Example:
        >>> sorted_slots = shoestring.moe_sort(torch.tensor([[1, 0], [0, 1]]), 2)
        >>> sorted_slots.order, sorted_slots.offsets
        (tensor([1, 2, 0, 3]), tensor([0, 2, 4]))
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor


def moe_sort(index: Tensor, experts: int) -> MoeSort:
    """Sort the slots of ``index`` by their experts; slots of the same expert keep their order.

    A counting sort reads the index twice and compares nothing. Results do not depend on the number of threads.

    Args:
        index: int64 of any shape, such as (tokens, top_k) from :func:`moe_route`: values in [0, experts), or -1
            for no expert. On a GPU, other values are no expert either, because an error would wait for the GPU.
        experts: number of experts, at most 2048.

    Returns:
        order, inverse and offsets.

    Raises:
        RuntimeError: index is not int64, or on the CPU has a value outside of [-1, experts).

    Example:
        >>> x, index = torch.randn(3, 4), torch.tensor([[2, 0], [0, 1], [2, 1]])
        >>> order, inverse, offsets = shoestring.moe_sort(index, 3)
        >>> rows = x[order // 2]  # the rows of x by expert
        >>> torch.equal(rows[inverse].view(3, 2, 4), x.unsqueeze(1).expand(3, 2, 4))
        True
    """
    return MoeSort(*kept_call(lambda: torch.ops.shoestring.moe_sort(index, experts)))

"""The format of double quantisation: scales of 4-bit blocks in 8 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 256  # number of blocks that share a scale of their scales
VALUES = 256  # number of values that the 8 bits of a scale can stand for
HEAD = 1 + VALUES  # number of elements before the scales


class NestedScales(NamedTuple):
    """The parts of a ``nested`` tensor (fp32, 257 + ceil(blocks / 256)), as views into it.

    The scale of block b is ``values[code of b] * scales[b // 256] + offset``.
    """

    offset: Tensor  # ()
    values: Tensor  # (256)
    scales: Tensor  # (ceil(blocks / 256))

    @classmethod
    def of(cls, nested: Tensor) -> "NestedScales":
        """Split a ``nested`` tensor."""
        return cls(nested[0], nested[1:HEAD], nested[HEAD:])

    def join(self) -> Tensor:
        """Return the parts as one ``nested`` tensor, a copy."""
        return torch.cat([self.offset.reshape(1), self.values, self.scales])


def groups_of(blocks: int) -> int:
    """Return the number of scales that so many blocks share."""
    return -(-blocks // GROUP)

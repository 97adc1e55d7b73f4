"""The format of double quantisation, in which the scales of 4-bit blocks are quantised to 8 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 256  # number of 4-bit blocks whose scales share a second-level scale
VALUES = 256  # number of values that an 8-bit code of a scale can represent
HEAD = 1 + VALUES  # number of elements before the second-level scales: the offset and the table of values


class NestedScales(NamedTuple):
    """The parts of a ``nested`` tensor, which holds the tables of double quantisation, as views.

    A ``nested`` tensor is fp32, (257 + ceil(blocks / 256)). The scale of the 4-bit block b has an 8-bit code
    c. Its value is ``values[c] * scales[b // 256] + offset``.
    """

    offset: Tensor  # ()
    values: Tensor  # (256)
    scales: Tensor  # (ceil(blocks / 256))

    @classmethod
    def of(cls, nested: Tensor) -> "NestedScales":
        """Split a ``nested`` tensor into offset, values and scales."""
        return cls(nested[0], nested[1:HEAD], nested[HEAD:])

    def join(self) -> Tensor:
        """Copy offset, values and scales into one ``nested`` tensor."""
        return torch.cat([self.offset.reshape(1), self.values, self.scales])


def groups_of(blocks: int) -> int:
    """Return the number of second-level scales for ``blocks`` 4-bit blocks: one for every 256 blocks."""
    return -(-blocks // GROUP)

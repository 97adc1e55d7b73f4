"""Random bits in plain PyTorch, which operators of several rooms use."""

from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], seed: int) -> Tensor:
    """Return 16 random bits (int64) for each of 8 n elements.

    The random numbers are Philox 4x32 with 7 rounds (Salmon et al., SC 2011). ``counter`` is four int64 tensors
    (n), whose elements are 32-bit words. The four output words of a counter serve 8 consecutive elements: the
    lower half of a word serves one element, the upper half the next.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & MASK, seed >> 32 & MASK
    for _ in range(7):
        # The 64-bit products wrap around in int64. `& MASK` clears the copies of the sign bit that the right
        # shift fills in.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b >> 32 & MASK ^ c1 ^ key0, b & MASK, a >> 32 & MASK ^ c3 ^ key1, a & MASK
        key0, key1 = key0 + 0x9E3779B9 & MASK, key1 + 0xBB67AE85 & MASK
    words = torch.stack([c0, c1, c2, c3], 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).flatten()

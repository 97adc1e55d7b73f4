"""Compare the bits of results that are computed with several numbers of threads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_same_bits(run: Callable[[], Sequence[Tensor]], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Assert that ``run`` returns the same bits with each number of threads, and return all results.

    The number of threads is the former one afterwards, also if ``run`` raises.
    """
    threads, found = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(run())
    finally:
        torch.set_num_threads(threads)
    for count, again in zip(counts[1:], found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True)), f"{count} threads"
    return found

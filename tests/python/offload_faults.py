"""Inject faults into the transfers of offloaded memory: delays and errors of copies, reads and writes."""

import functools

import torch

from build_folder import library


@functools.cache
def _load() -> None:
    torch.ops.load_library(str(library("liboffload_faults.so")))


def disturb_offload(
    max_delay_us: int = 0,
    fail_after: int = -1,
    error: int = 0,
    short_transfers: bool = False,
    reserves: bool = True,
) -> None:
    """Disturb every transfer of offloaded memory from now on; without arguments, disturb none.

    Args:
        max_delay_us: upper limit of a random delay before each copy, read or write, in microseconds.
        fail_after: number of reads and writes that succeed before one fails; -1: none fails.
        error: the errno of the read or write that fails.
        short_transfers: transfer only half of each read or write of more than 8 KiB.
        reserves: False makes the file system report that it cannot reserve blocks (fallocate).
    """
    _load()
    torch.ops.shoestring_tests.disturb_offload(max_delay_us, fail_after, error, short_transfers, reserves)

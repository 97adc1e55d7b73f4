"""Test forks of a process with a prefetcher: a child can drop the prefetcher, but not use it."""

import gc
import os
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from children import in_child
from shoestring.data import Prefetcher

pytestmark = pytest.mark.fresh


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with warnings.catch_warnings():
        # Ignore Python's warning about forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def source(number: int) -> Tensor:
    time.sleep(0.002)
    return torch.full((5,), number)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_children(taken: int) -> None:
    held = [Prefetcher(source, "cpu")]
    for number in range(taken):
        assert int(next(held[0])[0]) == number
    parent = os.getpid()

    def use() -> None:
        assert held[0].state_dict() == {"position": taken}
        with pytest.raises(
            RuntimeError, match=f"Prefetcher: expected process {parent}, which created this object"
        ):
            next(held[0])
        own = Prefetcher(source, "cpu", start=7)
        assert int(next(own)[0]) == 7
        own.close()
        held[0].close()

    def drop() -> None:
        held.clear()
        gc.collect()

    for task in (use, drop):
        in_child(task)
    assert int(next(held[0])[0]) == taken

"""Test that a process group ends with the object that used it last, whatever threads of Gloo do (two processes)."""

from __future__ import annotations

import faulthandler
import gc
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoestring
from processes import run
from shoestring.distributed import DiLoCo, shard


def _end(rank: int, user: str) -> None:
    """Free the last object that uses a group, while a thread of Gloo frees a tensor and waits for Python's lock."""
    faulthandler.dump_traceback_later(30, exit=True)
    group = dist.new_group([0, 1])
    optimizer = shoestring.optim.AdamW(nn.Linear(4, 4).parameters())
    last = DiLoCo(optimizer, group) if user == "DiLoCo" else optimizer
    if user == "shard":
        shard(optimizer, group)
    begun = threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            time.sleep(0.5)

    summed = torch.ones(4)
    summed.slow = Slow()  # type: ignore[attr-defined]
    time.sleep(0.3 * rank)  # so the sum of rank 0 is under way when it frees its tensor
    work = dist.all_reduce(summed, group=group, async_op=True)
    del summed, work
    assert begun.wait(20)
    dist.destroy_process_group(group)
    del group, optimizer, last
    gc.collect()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("user", ["shard", "DiLoCo"])
def test_a_group_ends_with_its_last_user(user: str, tmp_path: Path) -> None:
    run(2, tmp_path, _end, user)

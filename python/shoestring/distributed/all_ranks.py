"""Check that all ranks of a process group call a function, before they communicate in it."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator

import torch.distributed as dist

# The time in which the other ranks must call, once rank 0 has called. Ranks that call before rank 0 wait
# longer for it, since trainers write files on rank 0.
SECONDS = 120.0

# All ranks of a group make their objects in the same order.
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


class AllRanks:
    """Make sure that all ranks of a group have called the same function.

    A collective that only some ranks call waits until the timeout of the group, or meets another collective of
    the other ranks and ends the process. This class communicates through the store of the group alone, so it can
    raise an error before.

    Args:
        group: the processes. Each makes its object after the same number of others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = group.get_group_store()
        self.rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._prefix = f"shoestring/all_ranks/{next(_numbers[group.group_name])}"
        self._calls = 0

    def _key(self, call: int, rank: int) -> str:
        return f"{self._prefix}/{call}/{rank}"

    def wait(self, what: str, remedy: str) -> None:
        """Wait until all ranks have called this function as often as this rank.

        Args:
            what: the name of the function that calls, which begins errors.
            remedy: the sentence that ends errors.

        Raises:
            RuntimeError: a rank has not called in time. The call does not count then.
        """
        call = self._calls
        keys = [self._key(call, rank) for rank in range(self._size)]
        since, rank_0_was_here, pause = time.monotonic(), self.rank == 0, 0.001
        self._store.set(keys[self.rank], "1")
        try:
            while not self._store.check(keys):
                if not rank_0_was_here and self._store.check(keys[:1]):
                    since, rank_0_was_here = time.monotonic(), True
                limit = SECONDS if rank_0_was_here else dist.default_pg_timeout.total_seconds()
                if time.monotonic() - since > limit:
                    self._raise(keys, limit, what, remedy)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        except BaseException:
            self._store.delete_key(keys[self.rank])
            raise
        self._calls += 1
        # All ranks have called again, so none of them still waits for the call before this one.
        if call > 0:
            self._store.delete_key(self._key(call - 1, self.rank))

    def _raise(self, keys: list[str], limit: float, what: str, remedy: str) -> None:
        absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        ranks = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {', '.join(absent)} have"
        raise RuntimeError(
            f"{what}: expected a call on all {self._size} ranks, each of which has a part of the state; {ranks} not called "
            f"within {limit:g} s. {remedy}"
        )

"""Measure a link, and compute the time and the bytes of collectives over it by formulas of its latency and bandwidth."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoestring.core.device import synchronize
from shoestring.distributed.groups import group_or_default

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_FORM = "bandwidth,latency, such as 100Mbit,30ms or 25GB/s,5us"
# Gloo reduces segments of this size; see Collective.
_GLOO_SEGMENT = 1 << 20


@dataclass(frozen=True)
class Link:
    """The connection of a rank with the others.

    Attributes:
        bandwidth: bytes a second that a rank can send while it receives as many.
        latency: seconds until the first byte of a message arrives.

    Example:
        >>> from shoestring.distributed.links import Link
        >>> Link.parse("100Mbit,30ms")
        Link(bandwidth=12500000.0, latency=0.03)
    """

    bandwidth: float
    latency: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Return the link that a text such as "100Mbit,30ms" describes.

        Units of bandwidth are bit/s (also bit and bps) and B/s, with the prefixes K, M, G, T, Ki, Mi, Gi and Ti. Units of
        latency are s, ms, us and ns.

        Raises:
            ValueError: the text is no such pair, or a number is out of range.
        """
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != 2:
            raise ValueError(f"expected {_FORM}, received {text!r}")
        rate = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:[kKmMgGtT]i?)?)(bit|bit/s|bps|B|B/s)", parts[0])
        if rate is None:
            raise ValueError(
                f"expected a bandwidth such as 100Mbit, 1Gbit/s or 25GB/s, received {parts[0]!r}"
            )
        delay = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs|ns)", parts[1])
        if delay is None:
            raise ValueError(f"expected a latency such as 30ms or 5us, received {parts[1]!r}")
        bandwidth = float(rate[1]) * _PREFIXES[rate[2].upper()] / (1 if rate[3][0] == "B" else 8)
        latency = float(delay[1]) * _SECONDS[delay[2]]
        if not 0 < bandwidth < 1e18 or not latency < 1e6:
            raise ValueError(
                f"expected a bandwidth above 0 and below 1e18 bytes/s, and a latency below 1e6 s, received {text!r}"
            )
        return cls(bandwidth, latency)

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        name = next((name for name in "TGMK" if bits >= _PREFIXES[name]), "")
        unit, size = next(((u, s) for u, s in _SECONDS.items() if self.latency >= s), ("ns", 1e-9))
        return f"{bits / _PREFIXES[name]:.4g}{name}bit,{self.latency / size:.4g}{unit}"


def measure_link(
    device: torch.device | str = "cpu",
    *,
    sizes: Sequence[int] = (1 << 20, 4 << 20, 16 << 20),
    repeats: int = 5,
) -> Link:
    """Measure the link between the first and the last rank of the default group, which are on two machines if any are.

    The latency is half of the time of a message of 4 bytes and its answer. The bandwidth is the slope of the time of a
    message and an answer of 4 bytes, by the size of the message. All ranks must call this function.

    Args:
        device: the device whose tensors are sent; the group needs a backend for it.
        sizes: bytes of the messages, at least two different numbers.
        repeats: messages of each size, of which the median counts.

    Returns:
        The same link on all ranks. Its text is what ``shoestring estimate --link`` and ``plan_training`` take.

    Raises:
        RuntimeError: no process group was initialised.
        ValueError: there is one process, or ``sizes`` has fewer than two different numbers.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> try:
        ...     link = shoestring.distributed.measure_link()
        ... except ValueError:  # one process sends nothing
        ...     link = shoestring.distributed.Link.parse("10Gbit,50us")
        >>> str(link)
        '10Gbit,50us'
        >>> dist.destroy_process_group()
    """
    group = group_or_default(None, "measure_link")
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if last == 0:
        raise ValueError("measure_link: expected two or more processes, received one, which sends nothing")
    if len({*sizes}) < 2:
        raise ValueError(f"measure_link: sizes: expected two or more different numbers, received {[*sizes]}")
    place = torch.device(device)
    found = torch.zeros(2, dtype=torch.float64, device=place)
    if rank in (0, last):
        peer = last - rank
        answer = torch.zeros(1, device=place)

        def median(size: int, times: int) -> float:
            message = torch.zeros(max(1, size // 4), device=place)
            seconds = []
            for _ in range(times + 1):
                synchronize(place)
                began = time.perf_counter()
                if rank == 0:
                    dist.send(message, peer)
                    dist.recv(answer, peer)
                else:
                    dist.recv(message, peer)
                    dist.send(answer, peer)
                synchronize(place)
                seconds.append(time.perf_counter() - began)
            return statistics.median(seconds[1:])

        latency = median(4, 20 * repeats) / 2
        seconds = [median(size, repeats) for size in sizes]
        slope = statistics.linear_regression(sizes, seconds).slope
        if slope <= 0:
            # The times differ by noise alone, so the bandwidth is at least that of the largest message.
            slope = max(seconds) / max(sizes)
        found[0], found[1] = 1 / slope, latency
    dist.broadcast(found, 0)
    bandwidth, latency = found.tolist()
    return Link(bandwidth, latency)


class _Volumes(NamedTuple):
    messages: float  # number of messages one after the other
    carried: float  # bytes that take time
    sent: float  # bytes that a rank sends


@dataclass(frozen=True)
class Collective:
    """One collective of all ranks of a group.

    The formulas are those of rings (all-reduce, reduce-scatter, all-gather) and of pairs (all-to-all). Gloo has its own:
    its reduce-scatter is an all-reduce, and its reduce is a reduce-scatter over a ring and a gather, which sends
    segments above 2 x ranks of 1 MiB once more than needed. Both were counted on a loopback device. Between two ranks,
    its all-to-all takes twice, and its all-gather 1.5 times as long, measured over a link of 200 Mbit/s.

    Attributes:
        kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "reduce" or "gather".
        bytes: the message: the input of all-reduce, reduce-scatter, all-to-all and reduce; the output of all-gather
            and of gather.
        ranks: the number of ranks in the group.
        what: what is sent, such as "gradients".
        inner: whether the group is within a machine.
    """

    kind: str
    bytes: int
    ranks: int
    what: str
    inner: bool = False

    def _volumes(self, gloo: bool) -> _Volumes:
        n, size = self.ranks, self.bytes
        if n == 1 or size == 0:
            return _Volumes(0, 0, 0)
        share = (n - 1) / n * size
        kind = "all-reduce" if gloo and self.kind == "reduce-scatter" else self.kind
        if kind == "all-reduce":
            return _Volumes(2 * (n - 1), 2 * share, 2 * share)
        if kind == "gather":  # the root receives from all others
            return _Volumes(1, share, share / n)
        if kind == "reduce":
            again = max(0, size - 2 * n * _GLOO_SEGMENT) / n
            if gloo:
                return _Volumes(n, 2 * share + again, share * (1 + 1 / n) + again)
            return _Volumes(n - 1, size, share)
        # Two ranks of Gloo ask for each message over the connection on which the other one arrives.
        turns = {"all-to-all": 2.0, "all-gather": 1.5}.get(kind, 1.0) if gloo and n == 2 else 1.0
        return _Volumes(n - 1, turns * share, share)

    def sent(self, gloo: bool) -> float:
        """Return the bytes that a rank sends, on average over the ranks."""
        return self._volumes(gloo).sent

    def seconds(self, link: Link, gloo: bool) -> float:
        """Return the time over a link of which nobody else sends anything."""
        volumes = self._volumes(gloo)
        return volumes.messages * link.latency + volumes.carried / link.bandwidth

"""The time and the bytes of collectives over a link, by formulas of its latency and bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

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

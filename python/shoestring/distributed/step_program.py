"""Simulate a training step of a rank: computation, collectives that overlap with it, and memory that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoestring.distributed.links import Collective, Link


@dataclass(frozen=True)
class Compute:
    """The rank computes for a share of the seconds of a step."""

    share: float


@dataclass(frozen=True)
class Send:
    """The rank begins a collective, and goes on.

    Attributes:
        collective: the collective.
        after: the number of an earlier collective that must end before this one begins, or None.
    """

    collective: Collective
    after: int | None = None


@dataclass(frozen=True)
class Wait:
    """The rank waits until a collective has ended. ``number`` counts the collectives of the program from 0."""

    number: int


@dataclass(frozen=True)
class Hold:
    """The rank allocates bytes, or frees them (negative bytes)."""

    bytes: int


Operation = Compute | Send | Wait | Hold


@dataclass
class Program:
    """The operations of a rank in a step, in order. All ranks run the same program at the same time.

    Attributes:
        operations: the operations.
    """

    operations: list[Operation] = field(default_factory=list)
    _sent: int = 0

    def compute(self, share: float) -> None:
        """Compute for a share of the seconds of a step."""
        self.operations.append(Compute(share))

    def send(self, collective: Collective, after: int | None = None) -> int:
        """Begin a collective; return its number."""
        self.operations.append(Send(collective, after))
        self._sent += 1
        return self._sent - 1

    def wait(self, *numbers: int) -> None:
        """Wait for collectives."""
        self.operations += [Wait(number) for number in numbers]

    def hold(self, size: int) -> None:
        """Allocate bytes, or free them."""
        if size:
            self.operations.append(Hold(size))

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the step, in the order in which they begin."""
        return [each.collective for each in self.operations if isinstance(each, Send)]

    def peak(self) -> int:
        """Return the largest number of bytes that the program holds at a time."""
        held_bytes = most = 0
        for each in self.operations:
            if isinstance(each, Hold):
                held_bytes += each.bytes
                most = max(most, held_bytes)
        return most

    def seconds(self, step: float, link: Link, inner: Link | None = None, gloo: bool = False) -> float:
        """Return the seconds of the program.

        Collectives of a link take place one after the other, in the order in which they begin.

        Args:
            step: seconds that a rank computes in a step.
            link: what connects the ranks.
            inner: what connects the ranks of a machine; None for the same.
            gloo: whether Gloo sends.
        """
        now = 0.0
        free = {False: 0.0, True: 0.0}  # when the link, and the link within a machine, are free
        ends: list[float] = []
        for each in self.operations:
            if isinstance(each, Compute):
                now += each.share * step
            elif isinstance(each, Wait):
                now = max(now, ends[each.number])
            elif isinstance(each, Send):
                is_inner = each.collective.inner and inner is not None
                begin = max(now, free[is_inner], 0.0 if each.after is None else ends[each.after])
                over = inner if is_inner and inner is not None else link
                ends.append(begin + each.collective.seconds(over, gloo))
                free[is_inner] = ends[-1]
        return max(now, *ends) if ends else now


def sent_bytes(collectives: Sequence[Collective], gloo: bool) -> dict[str, float]:
    """Return the bytes that a rank sends, on average over the ranks, by what is sent."""
    sent: dict[str, float] = {}
    for each in collectives:
        sent[each.what] = sent.get(each.what, 0.0) + each.sent(gloo)
    return sent

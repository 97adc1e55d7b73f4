"""How processes divide a model: units of blocks, buckets of gradients, and parts of the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from shoestring.checkpoint.blocks import listed_blocks
from shoestring.distributed.groups import operators, plain_tensors
from shoestring.optim.state_layout import blocks
from shoestring.optim.state_sizes import State, StateArena, total

# Bytes of the buckets of DistributedDataParallel after its first step.
DDP_BUCKETS = [1 << 20, 25 << 20]


class Range(NamedTuple):
    """Elements [begin, end) of a parameter that one rank steps."""

    param: Tensor
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return (self.end - self.begin) * self.param.element_size()


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together.

    Attributes:
        params: the parameters, or the parameters of which it has a range, in the order of their gradients.
        elements: the number of elements.
        bytes: their bytes.
        owner: the rank that receives them; None if all do.
    """

    params: tuple[Tensor, ...]
    elements: int
    bytes: int
    owner: int | None = None


@dataclass(frozen=True)
class Unit:
    """Parameters that ``fully_shard`` gathers together: those of a block, or those outside of all blocks."""

    params: tuple[Tensor, ...]
    ranks: int

    @property
    def gathered(self) -> int:
        """Bytes of the gathered weights, with padded rows."""
        return self.ranks * sum(shard_bytes(p, self.ranks) for p in self.params)

    @property
    def gradients(self) -> int:
        """Bytes of the trained parameters' gradients, with padded rows."""
        return sum(
            shard_elements(p, self.ranks) * self.ranks * p.element_size() for p in trained_of(self.params)
        )


def trained_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that require gradients."""
    return [p for p in params if p.requires_grad]


def shard_elements(param: Tensor, ranks: int) -> int:
    """Return the elements that the first of ``ranks`` ranks has: ``fully_shard`` splits dimension 0 by whole rows."""
    rows = param.shape[0]
    return param.numel() // rows * math.ceil(rows / ranks) if rows else 0


def shard_tensors(param: Tensor, ranks: int) -> list[int]:
    """Return the bytes of each tensor of which the first rank's rows consist: one, or those of a quantised tensor."""
    part = shard_elements(param, ranks) / param.numel() if param.numel() else 0
    return [round(t.nbytes * part) for _, t in plain_tensors("", param)]


def shard_bytes(param: Tensor, ranks: int) -> int:
    """Return the bytes of the first rank's rows, also of a quantised tensor."""
    return sum(shard_tensors(param, ranks))


def units(model: nn.Module, ranks: int) -> list[Unit]:
    """Return the units of ``shoestring.parallelize``: each block in the order of forward, and the rest at the end."""
    seen: set[int] = set()
    found = []
    for module in [*listed_blocks(model).values(), model]:
        own = [p for p in module.parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        found.append(Unit(tuple(own), ranks))
    return found


def ddp_buckets(model: nn.Module) -> list[Bucket]:
    """Return the buckets of DistributedDataParallel if gradients come in the reverse order of the parameters."""
    params: list[Tensor] = trained_of(model.parameters())[::-1]
    if not params:
        return []
    indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        params, DDP_BUCKETS, [False] * len(params), list(range(len(params)))
    )
    buckets = [tuple(params[i] for i in own) for own in indices]
    return [Bucket(own, sum(p.numel() for p in own), sum(p.nbytes for p in own)) for own in buckets]


def split_arena(arena: StateArena, ranks: int, on_cpu: bool) -> list[list[Range]]:
    """Return the ranges of an arena's parameters that each rank steps."""
    return [[Range(*piece) for piece in own] for own in arena.core.split(arena.params, ranks, on_cpu)]


@dataclass(frozen=True)
class RankPart:
    """The part of a model that one rank steps with "zero1" and "zero2".

    Attributes:
        ranges: the elements of parameters.
        state: the sizes of their state.
    """

    ranges: list[Range]
    state: State

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the elements."""
        return sum(piece.bytes for piece in self.ranges)


def rank_parts(arenas: Sequence[StateArena], ranks: int, on_cpu: bool) -> list[RankPart]:
    """Return the parts of all ranks; each has the steps of all parameters, since ranks count them on their own."""
    steps = {"step": 4 * sum(len(arena.params) for arena in arenas)}
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    factors = [0] * ranks
    own_arenas: list[list[StateArena]] = [[] for _ in range(ranks)]
    for arena in arenas:
        own = split_arena(arena, ranks, on_cpu)
        extras = {id(p): size for p, size in zip(arena.params, arena.extras, strict=True)}
        for rank in range(ranks):
            ranges[rank] += own[rank]
            factors[rank] += sum(extras[id(piece.param)] for piece in own[rank])
            if own[rank]:
                counts = [blocks(end - begin) for _, begin, end in own[rank]]
                own_arenas[rank].append(replace(arena, blocks=counts))
    return [
        RankPart(ranges[rank], State(own_arenas[rank], total({"factors": factors[rank]}, steps)))
        for rank in range(ranks)
    ]


def owned_buckets(params: Sequence[Tensor], ranges: list[list[Range]], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of ZeRO-2 in the order in which they are sent.

    Args:
        params: the trained parameters in the order of the optimizer.
        ranges: what each rank steps.
    """
    found = []
    for owner, elements, indices in operators()._reduced_buckets([*params], ranges, bucket_bytes):
        own = tuple(params[i] for i in indices)
        found.append(Bucket(own, elements, elements * own[0].element_size(), owner))
    return found


def tables(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings."""
    return [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]


def heads(model: nn.Module) -> list[Tensor]:
    """Return the weights of linear layers, of which that of the output layer may be an embedding's, too."""
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear)]


def compute_shares(model: nn.Module) -> dict[int, float]:
    """Return the share of each parameter, by its id, in the computation of forward and of backward.

    Matrices take time in proportion to their elements. Embeddings whose weight no other layer has, and vectors, take
    none.
    """
    alone = {id(p) for p in tables(model)} - {id(p) for p in heads(model)}
    found = {
        id(p): float(p.numel()) if p.ndim >= 2 and id(p) not in alone else 0.0 for p in model.parameters()
    }
    total = sum(found.values())
    return {key: value / total if total else 1 / len(found) for key, value in found.items()}

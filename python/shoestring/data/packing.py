"""Packed batches: sequences one after the other in a row without padding, and which of them share a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shoestring.data.batches import IGNORE, packed_arguments

_GROUP = (
    8192  # sequences that are packed at a time: enough to fill bins, few enough that an epoch stays shuffled
)


class MultipackBatchSampler(Sampler[list[int]]):
    """Batches of indices whose sequences have at most ``capacity`` tokens together: a ``DataLoader``'s ``batch_sampler``.

    An epoch's order is drawn from ``seed`` and the epoch (``set_epoch``); stretches of it are packed, the longest
    sequences first, each into the first batch with room (first-fit decreasing, ``torch.ops.shoestring.pack_sequences``),
    and the batches shuffled. Every process of a group has as many batches: what is left over is dropped.

    Args:
        lengths: tokens of each sequence, 1 to ``capacity``.
        capacity: tokens of a batch.
        seed: of the order.
        num_replicas, rank: the processes that share an epoch, and this one's number.

    Raises:
        RuntimeError: a sequence that no batch has room for.
        ValueError: a rank that is none of the processes'.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        capacity: int,
        *,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"MultipackBatchSampler: rank: expected 0 to {num_replicas - 1}, received {rank}"
            )
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self.capacity = capacity
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0
        self._packed: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Another order."""
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        if self._packed is not None and self._packed[0] == self.epoch:
            return self._packed[1]
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + self.epoch) % 2**63)
        batches: list[list[int]] = []
        for group in torch.randperm(len(self.lengths), generator=generator).split(_GROUP):
            bins = torch.ops.shoestring.pack_sequences(self.lengths[group], self.capacity)
            order = bins.argsort(stable=True)
            batches += [group[part].tolist() for part in order.split(bins.bincount().tolist())]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        self._packed = (self.epoch, [batches[i] for i in shuffled])
        return self._packed[1]

    def efficiency(self) -> float:
        """The share of ``capacity`` that an epoch's batches fill: 1 is no waste."""
        return int(self.lengths.sum()) / max(1, len(self._batches()) * self.capacity)

    def __len__(self) -> int:
        return len(self._batches()) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches()[self.rank : len(self) * self.num_replicas : self.num_replicas])


class PackingCollator:
    """Sequences to one row of a Hugging Face causal language model, each attending to itself alone.

    For models with :func:`shoestring.register_attention`'s attention. A sequence is a mapping with ``input_ids`` and, if it has
    them, ``labels`` of the same length, lists or tensors; without labels, the tokens are their own.

    Returns:
        A dictionary: ``input_ids``, ``labels`` and ``position_ids`` (1, tokens) int64, a sequence's first label being -100, as
        the token before it is another's; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (sequences + 1) int32; ``max_length_q`` and
        ``max_length_k``, which other libraries want; and an ``attention_mask`` of one element, with which transformers
        makes none of (tokens, tokens).
    """

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids = [torch.as_tensor(s["input_ids"], dtype=torch.int64) for s in sequences]
        labels = [
            torch.as_tensor(s.get("labels", i), dtype=torch.int64).clone() for s, i in zip(sequences, ids)
        ]
        for i, (tokens, label) in enumerate(zip(ids, labels)):
            if tokens.dim() != 1 or tokens.shape != label.shape or not len(tokens):
                raise ValueError(
                    f"PackingCollator: labels: expected one for each of a sequence's tokens, received {list(label.shape)} for "
                    f"input_ids {list(tokens.shape)} in sequence {i}"
                )
            label[0] = IGNORE
        return {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            **packed_arguments([len(t) for t in ids]),
        }

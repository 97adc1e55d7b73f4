"""Pack sequences into batches: a sampler that groups them, and a collator that joins them unpadded."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shoestring.data.batches import IGNORE, packed_arguments

__all__ = ["MultipackBatchSampler", "PackedOrder", "PackingCollator"]

# Number of shuffled sequences that are packed at a time: enough to fill the batches well, and few enough to
# keep the order of an epoch random.
_GROUP = 8192


class MultipackBatchSampler(Sampler[list[int]]):
    """Yield batches of sequence indices; the sequences of a batch have at most ``capacity`` tokens in total.

    Use this sampler as the ``batch_sampler`` of a ``DataLoader``. The order of the batches in an epoch
    depends on ``seed`` and the epoch number (see ``set_epoch``). The sampler shuffles all sequences, splits
    them into groups, and packs each group by first-fit decreasing (``torch.ops.shoestring.pack_sequences``):
    from the longest sequence to the shortest, it puts each into the first batch with room. Then it shuffles
    the batches. Every process gets the same number of batches; up to ``num_replicas`` - 1 remaining batches
    are dropped.

    Args:
        lengths: number of tokens of each sequence, 1 to ``capacity``.
        capacity: maximum number of tokens in a batch.
        seed: seed of the order of sequences and batches.
        num_replicas: number of processes that share an epoch.
        rank: index of this process.

    Raises:
        RuntimeError: a sequence is longer than ``capacity``. This error is raised when the batches of an
            epoch are first needed, not in the constructor.
        ValueError: ``rank`` is not between 0 and ``num_replicas`` - 1.

    Example:
        >>> from shoestring.data.packing import MultipackBatchSampler
        >>> sampler = MultipackBatchSampler(lengths=[5, 3, 4, 4], capacity=8)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 1], [2, 3]]
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

    @property
    def sampler(self) -> MultipackBatchSampler:
        """Return this sampler, since Accelerate sets the epoch of the sampler within a batch sampler that it divides."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number, which selects the order of the batches."""
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
        """Return the tokens of all sequences divided by the total ``capacity`` of an epoch's batches."""
        return int(self.lengths.sum()) / max(1, len(self._batches()) * self.capacity)

    def __len__(self) -> int:
        return len(self._batches()) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches()[self.rank : len(self) * self.num_replicas : self.num_replicas])


class PackedOrder:
    """The order of batches of as many examples as fit into ``capacity`` tokens.

    It depends only on the seed and the step, so that a resumed run needs no saved state. Each pass over the
    data packs the examples anew (see ``MultipackBatchSampler``), and uses each example once.

    Args:
        lengths: number of tokens of each example, 1 to ``capacity``.
        capacity: maximum number of tokens in a micro-batch.
        accumulate: number of micro-batches in a step.
        seed: seed of the order.

    Example:
        >>> from shoestring.data.packing import PackedOrder
        >>> order = PackedOrder(lengths=[5, 3, 4, 4], capacity=8, accumulate=2, seed=0)
        >>> sorted(sorted(batch) for batch in order.step(0))
        [[0, 1], [2, 3]]
    """

    def __init__(self, lengths: Sequence[int], capacity: int, accumulate: int, seed: int) -> None:
        self._sampler = MultipackBatchSampler(lengths, capacity, seed=seed)
        self._accumulate = accumulate
        self._ends = [0]  # number of batches of all passes before each pass
        self._pass, self._batches = -1, list[list[int]]()

    def step(self, step: int) -> list[list[int]]:
        """Return the indices of the examples in each micro-batch of a step; ``step`` counts from 0."""
        first = step * self._accumulate
        return [self._batch(number) for number in range(first, first + self._accumulate)]

    def _batch(self, number: int) -> list[int]:
        """Return the rows of a batch, counted over all passes."""
        while self._ends[-1] <= number:
            self._sampler.set_epoch(len(self._ends) - 1)
            self._ends.append(self._ends[-1] + len(self._sampler))
        current = bisect.bisect_right(self._ends, number) - 1
        if current != self._pass:
            self._sampler.set_epoch(current)
            self._pass, self._batches = current, list(self._sampler)
        return self._batches[number - self._ends[current]]


class PackingCollator:
    """Concatenate sequences into one row for a causal language model; each sequence attends only to itself.

    The model must use the attention of :func:`shoestring.register_attention`. A sequence is a mapping with
    ``input_ids`` and optionally ``labels`` of the same length, as lists or tensors. Without ``labels``, the
    tokens serve as labels.

    Returns:
        A dictionary with ``input_ids``, ``labels`` and ``position_ids`` (1, tokens) int64; ``cu_seq_lens_q``
        and ``cu_seq_lens_k`` (sequences + 1) int32; ``max_length_q`` and ``max_length_k``, the length of the
        longest sequence, which other attention libraries need; and an ``attention_mask`` with one element,
        which stops transformers from building a (tokens, tokens) mask. The first label of each sequence is
        -100, because the token before it belongs to another sequence.

    Raises:
        ValueError: ``labels`` and ``input_ids`` of a sequence differ in shape, are not 1-D, or are empty; the
            ``attention_mask`` of a sequence has zeros; or a mask of trained tokens comes without ``labels``.

    Example:
        >>> from shoestring.data.packing import PackingCollator
        >>> batch = PackingCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> batch["labels"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[-100, 2, 3, -100, 5]], [0, 3, 5])
    """

    def __call__(self, sequences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        for i, s in enumerate(sequences):
            mask = s.get("attention_mask")
            if mask is not None and not torch.as_tensor(mask).all():
                raise ValueError(
                    "PackingCollator: attention_mask: expected sequences without padding, received zeros in sequence "
                    f"{i}; leave the padding out"
                )
            for name in ("assistant_masks", "completion_mask"):
                if name in s and "labels" not in s:
                    raise ValueError(
                        f"PackingCollator: {name}: expected labels that are {IGNORE} where it is 0, received no labels "
                        f"in sequence {i}"
                    )
        ids = [torch.as_tensor(s["input_ids"], dtype=torch.int64) for s in sequences]
        labels = [
            torch.as_tensor(s.get("labels", i), dtype=torch.int64).clone() for s, i in zip(sequences, ids)
        ]
        for i, (tokens, label) in enumerate(zip(ids, labels)):
            if tokens.dim() != 1 or tokens.shape != label.shape or not len(tokens):
                raise ValueError(
                    "PackingCollator: labels: expected one label for each token of a sequence, received "
                    f"{list(label.shape)} for input_ids {list(tokens.shape)} in sequence {i}"
                )
            label[0] = IGNORE
        return {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            **packed_arguments([len(t) for t in ids]),
        }

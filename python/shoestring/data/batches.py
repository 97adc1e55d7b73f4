"""Data sets of token rows, and the order of the rows, which depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import InputError

IGNORE = -100  # label of a position that is ignored by the loss

# empty(size, dtype) returns an uninitialised CPU tensor, for example in the pinned memory of a Prefetcher.
Empty = Callable[[Sequence[int], torch.dtype], Tensor]


def in_host_memory(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor in ordinary host memory."""
    return torch.empty(size, dtype=dtype, device="cpu")


class Rows(Protocol):
    """A data set of token rows.

    ``rows(indices, empty)`` returns inputs and labels, both int64 (rows, tokens), in tensors that ``empty``
    makes. A label is the token that follows the input token at the same position. ``count(indices)`` returns
    the number of input tokens in the rows with these indices, without padding.
    """

    def __len__(self) -> int: ...

    def count(self, indices: list[int]) -> int: ...

    def rows(self, indices: list[int], empty: Empty = in_host_memory) -> tuple[Tensor, Tensor]: ...


def packed_arguments(lengths: Sequence[int]) -> dict[str, Any]:
    """Return model arguments with which each of the sequences packed into one row attends only to itself.

    The arguments are for a Hugging Face model that uses the attention of
    :func:`shoestring.register_attention`.

    Args:
        lengths: number of tokens of each sequence.

    Returns:
        ``position_ids`` (1, tokens) int64; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (sequences + 1) int32;
        ``max_length_q`` and ``max_length_k``, the length of the longest sequence, which other attention
        libraries need; and an ``attention_mask`` with one element, which stops transformers from building a
        (tokens, tokens) mask.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def labelled(labels: Tensor) -> int:
    """Return the number of labels, on the host, that count in the loss."""
    return int(np.count_nonzero(labels.numpy() != IGNORE))


@dataclass(frozen=True)
class Blocks:
    """A data set whose rows are consecutive blocks of a flat token array; every token has a label."""

    tokens: np.ndarray  # token ids, (number of tokens,), uint16 or uint32, usually memory-mapped
    seq_len: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def count(self, indices: list[int]) -> int:
        return len(indices) * self.seq_len

    def rows(self, indices: list[int], empty: Empty = in_host_memory) -> tuple[Tensor, Tensor]:
        size = len(indices), self.seq_len
        inputs, labels = empty(size, torch.int64), empty(size, torch.int64)
        for row, i in enumerate(indices):
            first, end = i * self.seq_len, (i + 1) * self.seq_len
            # This widens the tokens of the mapped file in one pass, without a tensor in between.
            inputs.numpy()[row] = self.tokens[first:end]
            labels.numpy()[row] = self.tokens[first + 1 : end + 1]
        return inputs, labels


@dataclass(frozen=True)
class Examples:
    """A data set of examples, one per row, padded on the right to the longest example of the batch.

    Labels of tokens outside the completion are IGNORE. Padding needs no attention mask, because in causal
    attention no token attends to the padding after it. The method ``packed`` concatenates examples into one
    row instead, without padding.
    """

    tokens: np.ndarray  # token ids of all examples, concatenated: (number of tokens,), uint32
    trained: np.ndarray  # whether each token belongs to a completion: (number of tokens,), bool
    starts: np.ndarray  # offset of each example in `tokens`, and the end: (examples + 1,), int64
    records: np.ndarray  # number of the record that each example is from, ascending: (examples,), int64
    pad: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def count(self, indices: list[int]) -> int:
        return sum(int(self.starts[i + 1] - self.starts[i]) - 1 for i in indices)

    def rows(self, indices: list[int], empty: Empty = in_host_memory) -> tuple[Tensor, Tensor]:
        spans = self._spans(indices)
        size = len(spans), max(s.stop - s.start for s in spans) - 1
        inputs, labels = empty(size, torch.int64).fill_(self.pad), empty(size, torch.int64).fill_(IGNORE)
        for row, span in enumerate(spans):
            length = span.stop - span.start - 1
            self._fill(span, inputs.numpy()[row, :length], labels.numpy()[row, :length])
        return inputs, labels

    def packed(
        self, indices: list[int], empty: Empty = in_host_memory
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the examples as one row: inputs and labels (1, tokens), and arguments for the model.

        With the arguments, no token attends to another example.
        """
        spans = self._spans(indices)
        lengths = [s.stop - s.start - 1 for s in spans]
        size = 1, sum(lengths)
        inputs, labels = empty(size, torch.int64), empty(size, torch.int64)
        end = 0
        for span, length in zip(spans, lengths):
            begin, end = end, end + length
            self._fill(span, inputs.numpy()[0, begin:end], labels.numpy()[0, begin:end])
        return inputs, labels, packed_arguments([length for length in lengths if length > 0])

    def _spans(self, indices: list[int]) -> list[slice]:
        return [slice(int(self.starts[i]), int(self.starts[i + 1])) for i in indices]

    def _fill(self, span: slice, inputs: np.ndarray, labels: np.ndarray) -> None:
        """Write the inputs and labels of the example in ``span`` into int64 arrays of its length minus 1."""
        following = slice(span.start + 1, span.stop)
        inputs[:] = self.tokens[span.start : span.stop - 1]
        labels[:] = self.tokens[following]
        labels[~self.trained[following]] = IGNORE

    def subset(self, indices: list[int]) -> Examples:
        """Return the examples with these indices as a new data set."""
        spans = self._spans(indices)
        starts = np.cumsum([0, *(s.stop - s.start for s in spans)])
        return Examples(
            np.concatenate([self.tokens[:0], *(self.tokens[s] for s in spans)]),
            np.concatenate([self.trained[:0], *(self.trained[s] for s in spans)]),
            starts,
            self.records[indices],
            self.pad,
        )


def split_blocks(tokens: np.ndarray, seq_len: int, val_fraction: float) -> tuple[Blocks, Blocks]:
    """Split a flat token array into training blocks (the head) and validation blocks (the tail).

    The caller shuffles the files before their tokens are concatenated, so the tail is a random sample of
    files.
    """
    held_out = int(len(tokens) * val_fraction)
    if val_fraction > 0:
        held_out = max(held_out, seq_len + 1)
    train, val = (
        Blocks(tokens[: len(tokens) - held_out], seq_len),
        Blocks(tokens[len(tokens) - held_out :], seq_len),
    )
    if len(train) == 0:
        raise InputError(
            f"--data: {len(tokens)} tokens are too few for a training and a validation block of --seq-len {seq_len}; "
            "give more text or a smaller --seq-len"
        )
    return train, val


def split_examples(examples: Examples, seed: int, val_fraction: float) -> tuple[Examples, Examples]:
    """Split examples by records at random; hold out at least one record for validation if ``val_fraction`` > 0.

    Examples of one record repeat its text, so they stay together.
    """
    records, record_of = np.unique(examples.records, return_inverse=True)
    count = len(records)
    held_out = max(1, int(count * val_fraction)) if val_fraction > 0 else 0
    if count <= held_out:
        raise InputError(
            f"--data: {count} record(s) are too few to train on and to hold out {held_out} for validation"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
    is_held_out = np.isin(record_of, order[:held_out])
    train, val = (examples.subset(np.flatnonzero(side).tolist()) for side in (~is_held_out, is_held_out))
    return train, val


@dataclass
class BatchOrder:
    """The order of rows: each pass over the data uses a new permutation, drawn from seed and pass index."""

    rows: int  # number of rows in the data set
    batch_size: int  # rows per micro-batch
    accumulate: int  # micro-batches per step
    seed: int

    def __post_init__(self) -> None:
        self._pass, self._permutation = -1, np.empty(0, np.int64)

    def step(self, step: int) -> list[list[int]]:
        """Return the row indices of each micro-batch of a step; ``step`` counts from 0."""
        first = step * self.accumulate * self.batch_size
        drawn = [self._draw(first + i) for i in range(self.accumulate * self.batch_size)]
        return [drawn[i : i + self.batch_size] for i in range(0, len(drawn), self.batch_size)]

    def _draw(self, position: int) -> int:
        """Return the row at a position of the endless order, which shuffles all rows anew for each pass."""
        number, index = divmod(position, self.rows)
        if number != self._pass:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
            self._pass = number
            self._permutation = torch.randperm(self.rows, generator=generator).numpy()
        return int(self._permutation[index])

"""Tokenise whole texts, with the special tokens that the tokenizer's own call adds, and map characters to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoestring.core.errors import InputError

# Number of characters tokenised at once: enough work for every core, but a bounded amount of memory, since
# tokenised text takes about 100 bytes per token.
BATCH_CHARACTERS = 1 << 20
# Number of characters of a long document that a window adds. Tokens with their places take about 1 kB each.
WINDOW = 1 << 18
# Number of characters that two windows of a long document share. The windows are joined where they agree in the
# middle half of these characters, so each token near the join is known with 1,024 characters on both sides.
OVERLAP = 4096


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text: their ids, and which characters each covers."""

    ids: np.ndarray  # (tokens,), int64
    begins: np.ndarray  # first character of each token
    ends: np.ndarray  # character after the last one of each token
    words: np.ndarray  # index of the word in which the tokenizer found each token


class Marked(NamedTuple):
    """The tokens of a text of which some characters are trained."""

    ids: list[int]
    trained: list[bool]  # whether each token covers a trained character
    straddles: bool  # whether a trained token also covers characters that are not trained


class Encoder:
    """Tokenise texts as the tokenizer's own call does, and put its special tokens around a text once.

    Example:
        >>> from shoestring.data.encoding import Encoder
        >>> from shoestring.data.tokenizer import train_bpe
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("a text of some words")
        >>> encoder = Encoder(train_bpe([Path("text.txt")], 260))
        >>> encoder.begin, encoder.finish == [encoder.tokenizer.eos_token_id]
        ([], True)
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.begin, end = _added(tokenizer)
        eos = tokenizer.eos_token_id
        # The tokens after a document or a completion. They hold the end-of-text token exactly once.
        self.finish: list[int] = end if eos in end else [*end, eos]
        # Tokenizers that are written in Python do not tell which characters a token covers.
        self.has_offsets = bool(getattr(tokenizer, "is_fast", False))

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without added special tokens."""
        if not texts:
            return []
        result: list[list[int]] = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return result

    def tokens(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text, without added special tokens; only if the tokenizer has offsets."""
        if not texts:
            return []
        with _whole_offsets(self.tokenizer):
            encoded = self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                return_offsets_mapping=True,
                verbose=False,
            )
        result = []
        for i, ids in enumerate(encoded["input_ids"]):
            spans = np.array(encoded["offset_mapping"][i], np.int64).reshape(-1, 2)
            words = np.array([-1 if w is None else w for w in encoded.word_ids(i)], np.int64)
            result.append(Tokens(np.array(ids, np.int64), spans[:, 0], spans[:, 1], words))
        return result

    def begun(self, ids: list[int]) -> list[int]:
        """Return the ids after the special tokens that begin a text, unless the text begins with these itself."""
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def finished(self, ids: list[int]) -> list[int]:
        """Return the ids before the special tokens that end a text, unless the text ends with these itself."""
        return ids if ids[-len(self.finish) :] == self.finish else [*ids, *self.finish]

    def marked(self, texts: list[str], trained: list[np.ndarray]) -> list[Marked]:
        """Tokenise texts of which some characters are trained.

        Args:
            texts: whole texts.
            trained: whether each character of each text is trained.
        """
        if not self.has_offsets:
            return [
                self._marked_by_prefixes(ids, *pair)
                for ids, pair in zip(self.ids(texts), zip(texts, trained))
            ]
        return [_marked(tokens, mask) for tokens, mask in zip(self.tokens(texts), trained)]

    def _marked_by_prefixes(self, ids: list[int], text: str, trained: np.ndarray) -> Marked:
        """Mark tokens without offsets: where the trained characters change, the text before is tokenised too.

        The tokens that the text before and the whole text have in common cover nothing after the change. The
        next token is the first one that does, or one that the characters after the change have altered.
        """
        changes = np.flatnonzero(np.diff(trained, prepend=False))
        marks, straddles = [False] * len(ids), False
        prefixes = self.ids([text[:change] for change in changes.tolist()])
        unknown = self.tokenizer.unk_token_id
        state, first = False, 0
        for prefix in prefixes:
            end = 0
            while end < min(len(prefix), len(ids)) and prefix[end] == ids[end]:
                end += 1
            straddles |= end < len(prefix)
            while end and ids[end - 1] == unknown:  # an unknown token may also cover what follows
                end -= 1
            marks[first:end] = [state] * max(0, end - first)
            state, first = not state, max(first, end)
        marks[first:] = [state] * (len(ids) - first)
        return Marked(ids, marks, straddles)

    def document(self, pieces: Iterator[str]) -> Iterator[list[int]]:
        """Yield the token ids of one document, in parts; together they are those of the whole document."""
        pieces = _slices(pieces)
        text = next(pieces, "")
        following = next(pieces, None)
        if following is None or not self.has_offsets:
            whole = text + (following or "") + "".join(pieces)
            yield self.finished(self.begun(self.ids([whole])[0]))
            return
        begins, last = True, list[int]()
        for ids in self._windows(text, following, pieces):
            part = self.begun(ids) if begins else ids
            begins = begins and not ids
            last = [*last, *part][-len(self.finish) :]
            yield part
        yield self.finished(last)[len(last) :]

    def _windows(self, text: str, following: str, pieces: Iterator[str]) -> Iterator[list[int]]:
        """Yield the token ids of a long document, tokenised in windows that overlap.

        The tokens of two windows are joined where the windows agree. If they agree nowhere, as in a run of one
        letter that a tokenizer takes for one word, both are tokenised as one window.
        """
        tokens, first = self.tokens([text])[0], 0
        while following:
            shift = max(0, len(text) - OVERLAP)
            window = text[shift:] + following
            after = self.tokens([window])[0]
            join = _join(tokens, after, shift, len(text))
            if join is not None:
                yield tokens.ids[first : join[0]].tolist()
                text, tokens, first = window, after, join[1]
            else:
                begin, known = _start_of(tokens, first), tokens.ids[first : first + 1].tolist()
                text += following
                tokens = self.tokens([text])[0]
                first = int(np.searchsorted(tokens.begins, begin)) if first else 0
                if first and (
                    tokens.ids[first : first + 1].tolist() != known or tokens.begins[first] != begin
                ):
                    raise InputError(
                        "--data: the tokenizer cuts a place of a document in one way or another as the text thousands "
                        "of characters away has it; give shorter documents"
                    )
            wanted = len(text) if join is None else 0  # doubles the window, so that the time stays linear
            following = _read(pieces, wanted)
        yield tokens.ids[first:].tolist()


def _slices(pieces: Iterator[str]) -> Iterator[str]:
    """Yield the same text in pieces of at most ``WINDOW`` characters, without empty ones."""
    for piece in pieces:
        for begin in range(0, len(piece), WINDOW):
            yield piece[begin : begin + WINDOW]


def _read(pieces: Iterator[str], characters: int) -> str:
    """Return the next pieces, of at least so many characters in total if there are as many."""
    head = [next(pieces, "")]
    while head[-1] and sum(map(len, head)) < characters:
        head.append(next(pieces, ""))
    return "".join(head)


def _start_of(tokens: Tokens, index: int) -> int:
    """Return the index of the first character of a token, or -1 after the last token."""
    return int(tokens.begins[index]) if index < len(tokens.begins) else -1


def _join(before: Tokens, after: Tokens, shift: int, end: int) -> tuple[int, int] | None:
    """Return the indices in two windows of a token at which both may be joined, or None.

    Both have the same tokens of the same words in the middle half of the characters from ``shift`` to ``end``.
    The pair of tokens around the join and every pair before and after are then pairs that one of the windows
    has, so that byte-pair encoding of the whole has the same tokens. The words begin at the same characters, so
    that splitting text into words goes on in the same way.
    """
    low, high = shift + OVERLAP // 4, end - OVERLAP // 4
    a, b = _within(before, 0, low, high), _within(after, shift, low, high)
    count = len(a.ids)
    if count < 2 or count != len(b.ids):
        return None
    same = all(
        np.array_equal(x, y)
        for x, y in (
            (a.ids, b.ids),
            (a.begins, b.begins + shift),
            (a.ends, b.ends + shift),
            (np.diff(a.words) != 0, np.diff(b.words) != 0),
        )
    )
    # A join at a character of its own keeps both sides apart; bytes of one character share their offset.
    inner = np.flatnonzero(a.begins[1:] >= a.ends[:-1]) + 1
    if not same or not len(inner):
        return None
    middle = int(inner[len(inner) // 2])
    return int(np.searchsorted(before.begins, low)) + middle, int(
        np.searchsorted(after.begins, low - shift)
    ) + middle


def _within(tokens: Tokens, shift: int, low: int, high: int) -> Tokens:
    """Return the tokens that begin from ``low`` to ``high``, with ``shift`` added to their own places."""
    first, end = np.searchsorted(tokens.begins, (low - shift, high - shift))
    part = slice(int(first), int(end))
    return Tokens(tokens.ids[part], tokens.begins[part], tokens.ends[part], tokens.words[part])


def _marked(tokens: Tokens, trained: np.ndarray) -> Marked:
    count = np.concatenate([[0], np.cumsum(trained)])  # number of trained characters before each
    # A token without characters, such as the space that some tokenizers put first, belongs to the next character.
    begins = np.minimum(tokens.begins, max(0, len(trained) - 1))
    ends = np.minimum(np.maximum(tokens.ends, begins + 1), len(trained))
    covered = count[ends] - count[begins]
    straddles = bool(np.any((covered > 0) & (covered < ends - begins)))
    return Marked(tokens.ids.tolist(), (covered > 0).tolist(), straddles)


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer's own call puts before and after a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for first in range(len(whole) - len(plain) + 1):
        if plain and whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    raise InputError(
        f"tokenizer: {type(tokenizer).__name__}: expected special tokens before and after a text alone, got {whole} for "
        f"the letter a, and {plain} without special tokens; take another tokenizer"
    )


@contextmanager
def _whole_offsets(tokenizer: Any) -> Iterator[None]:
    """Let the offsets of tokens include their spaces, which byte-level tokenizers leave out after tokenising."""
    backend = tokenizer.backend_tokenizer
    before, backend.post_processor = backend.post_processor, None
    try:
        yield
    finally:
        backend.post_processor = before


def vocabulary_size(tokenizer: Any) -> int:
    """Return a size that every token id is below. Ids of some vocabularies have gaps."""
    largest: Sequence[int] = list(tokenizer.get_vocab().values())
    return max(len(tokenizer), max(largest, default=-1) + 1)

"""Read prompt/completion or chat records, and tokenise them into examples with marked completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import InputError
from shoestring.data.batches import Examples
from shoestring.data.chat import ChatReader, Segments
from shoestring.data.encoding import BATCH_CHARACTERS, Encoder, Marked
from shoestring.data.fields import check_fields
from shoestring.data.progress import advance, working
from shoestring.data.records import CHAT, COMPLETION, kind_of_value, read_records
from shoestring.data.text import size_of


@dataclass(frozen=True)
class Texts:
    """The texts of examples, each in pieces with whether to train on the piece."""

    kind: str  # prompt/completion or chat
    examples: list[Segments]
    records: list[int]  # number of the record that each example is from
    notes: list[str] = field(default_factory=list)  # lines for the user about what was done


@dataclass(frozen=True)
class Encoded:
    """The tokenised examples of some files, and what was done to them."""

    examples: Examples
    shortened: int  # number of examples whose end was cut off, because they are longer than seq_len
    dropped: int  # number of examples that were dropped, because no completion token fits within seq_len
    notes: list[str]  # lines for the user about what was done


def read_segments(files: list[Path], kind: str, tokenizer: Any) -> Texts:
    """Return the texts of the examples; check every record.

    Raises:
        InputError: a record has a field that is not understood, or lacks what it needs, or the chat template
            refuses it.
    """
    segments, records, chats = list[Segments](), list[int](), ChatReader(tokenizer)
    number = 0
    with working("reading examples", size_of(files)):
        for path in files:
            for where, record in read_records(path):
                check_fields(record, kind, where)
                new = chats.read(record, where) if kind == CHAT else [_completion(record, where)]
                segments += new
                records += [number] * len(new)
                number += 1
    return Texts(kind, segments, records, chats.notes())


def _completion(record: dict[str, Any], where: str) -> Segments:
    prompt, completion = record.get("prompt"), record.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        values = (("prompt", prompt), ("completion", completion))
        wrong = [(key, value) for key, value in values if key in record and not isinstance(value, str)]
        cause = f"its fields are {sorted(record)}"
        if wrong:
            cause = f'"{wrong[0][0]}" is {kind_of_value(wrong[0][1])}'
        raise InputError(f'{where}: expected the strings "prompt" and "completion"; {cause}')
    if not completion:
        raise InputError(f"{where}: the completion is empty, so there is nothing to learn")
    return [(prompt, False), (completion, True)]


def encode_examples(texts: Texts, tokenizer: Any, seq_len: int) -> Encoded:
    """Tokenise examples; cut each to ``seq_len`` + 1 tokens; drop examples without a token to train on.

    The whole text of an example is tokenised at once. A token is trained on if it covers a character to train
    on. A prompt with its completion has the special tokens that the tokenizer's own call adds, and ends with
    the end-of-text token, which is trained on. Chat templates write special tokens themselves, except the
    default one, before which the tokenizer's beginning is added.
    """
    encoder = Encoder(tokenizer)
    begins = texts.kind == COMPLETION or not tokenizer.chat_template
    tokens: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    records: list[int] = []
    shortened = dropped = straddling = 0
    encoded = _encode(texts.examples, encoder)
    for record, (ids, trained, straddles) in zip(texts.records, encoded, strict=True):
        count = len(ids)
        straddling += straddles
        if begins:
            ids = encoder.begun(ids)
            trained = [False] * (len(ids) - count) + trained
        if texts.kind == COMPLETION:
            count = len(ids)
            ids = encoder.finished(ids)
            trained = trained + [True] * (len(ids) - count)
        if len(ids) > seq_len + 1:
            shortened += 1
        ids, trained = ids[: seq_len + 1], trained[: seq_len + 1]
        if not any(trained[1:]):
            dropped += 1
            continue
        tokens.append(np.asarray(ids, np.uint32))
        marks.append(np.asarray(trained, bool))
        records.append(record)
    if not tokens:
        raise InputError(
            f"--data: no example has a completion within --seq-len {seq_len} tokens; give a larger --seq-len"
        )
    starts = np.cumsum([0, *map(len, tokens)])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    notes = list(texts.notes)
    if straddling:
        notes.append(
            f"{straddling} example(s) have a token that covers the end of a prompt and the beginning of its completion; "
            "it is trained on"
        )
    if shortened:
        notes.append(
            f"{shortened} example(s) were cut to --seq-len {seq_len}; {dropped} of them left out: no completion left"
        )
    examples = Examples(np.concatenate(tokens), np.concatenate(marks), starts, np.asarray(records), pad)
    return Encoded(examples, shortened, dropped, notes)


def _encode(examples: list[Segments], encoder: Encoder) -> Iterator[Marked]:
    """Yield what ``Encoder.marked`` returns for each example; tokenise some of them at a time."""
    texts, masks, characters = list[str](), list[np.ndarray](), 0
    with working("tokenizing", sum(len(text) for example in examples for text, _ in example)):
        for number, example in enumerate(examples, 1):
            texts.append("".join(text for text, _ in example))
            masks.append(
                np.repeat([trained for _, trained in example], [len(text) for text, _ in example]).astype(
                    bool
                )
            )
            characters += len(texts[-1])
            if characters >= BATCH_CHARACTERS or number == len(examples):
                yield from encoder.marked(texts, masks)
                advance(characters)
                texts, masks, characters = [], [], 0

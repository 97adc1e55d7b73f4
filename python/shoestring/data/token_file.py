"""Write and memory-map a flat file of token ids: a 64-byte header, then the ids, little-endian.

Header: magic ``shoetok\\x01`` (8 bytes), uint32 vocabulary size, uint32 bytes per token (2 or 4), uint64
number of tokens, 40 zero bytes. Tokens are uint16 if the vocabulary allows it, uint32 otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shoestring.core.errors import InputError
from shoestring.data.encoding import BATCH_CHARACTERS, Encoder, vocabulary_size
from shoestring.data.progress import working
from shoestring.data.text import documents, size_of
from shoestring.files.atomic import atomic_file
from shoestring.files.read_file import check_regular

MAGIC = b"shoetok\x01"
HEADER = struct.Struct("<8sIIQ40x")


def write_token_file(path: Path, files: list[Path], tokenizer: Any) -> int:
    """Tokenise ``files`` in the given order and write the tokens to ``path``; return the token count.

    Each file is a document, or holds several. Each document has the special tokens that the tokenizer's own
    call adds, and ends with the end-of-text token.
    """
    vocab_size = vocabulary_size(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    count = 0
    with working("tokenizing", size_of(files)), atomic_file(path) as out:
        out.write(HEADER.pack(MAGIC, vocab_size, dtype.itemsize, 0))
        for ids in _token_lists(files, Encoder(tokenizer)):
            out.write(np.asarray(ids, dtype).tobytes())
            count += len(ids)
        out.seek(0)
        out.write(HEADER.pack(MAGIC, vocab_size, dtype.itemsize, count))
    return count


def _token_lists(files: list[Path], encoder: Encoder) -> Iterator[list[int]]:
    """Yield the tokens of the documents; tokenise short documents together, for speed."""
    texts, characters = list[str](), 0

    def encode() -> Iterator[list[int]]:
        for ids in encoder.ids(texts):
            yield encoder.finished(encoder.begun(ids))

    for path in files:
        for document in documents(path):
            text = next(document, "")
            following = next(document, None)
            if following is not None:
                yield from encode()
                texts, characters = [], 0
                yield from encoder.document(chain((text, following), document))
                continue
            texts.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield from encode()
                texts, characters = [], 0
    yield from encode()


def read_token_file(path: Path) -> tuple[np.ndarray, int]:
    """Memory-map ``path``; return its tokens (1-D, uint16 or uint32) and the vocabulary size.

    Raises:
        InputError: the file does not begin with the header of a token file, or the header does not fit the
            file's size.
    """
    try:
        size = check_regular(path, str(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[:8] != MAGIC:
        raise InputError(f"{path}: not a token file (its first bytes are not the magic 'shoetok\\x01')")
    _, vocab_size, item, count = HEADER.unpack(head)
    if item not in (2, 4) or count * item != size - HEADER.size:
        raise InputError(
            f"{path}: header says {count} tokens of {item} bytes, the file holds {size - HEADER.size} bytes"
        )
    if count == 0:
        raise InputError(f"{path}: the token file holds no token")
    return np.memmap(path, dtype=f"<u{item}", mode="r", offset=HEADER.size, shape=(count,)), vocab_size

"""Read text in pieces, so that files of any size need little memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.data.formats import not_utf8
from shoestring.data.progress import advance
from shoestring.files.read_file import check_regular

CHUNK = 1 << 20  # number of bytes read from a file at once
LONGEST = 4 << 20  # maximum number of characters tokenised at once; longer lines and records are cut


def read_text(path: Path, whole_lines: bool = False) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of about 1 MiB, each of which ends after a line if possible.

    A byte-order mark is left out. A line of more than ``LONGEST`` characters is cut unless ``whole_lines``.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending: list[str] = []
    consumed, begun = 0, False
    with _open(path) as file:
        while True:
            block = file.read(CHUNK)
            # Number of bytes of an incomplete UTF-8 character at the end of the previous block.
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = consumed - undecoded + error.start
                raise InputError(f"{path}: {not_utf8(error, offset)}") from None
            consumed += len(block)
            advance(len(block))
            if text and not begun:
                text, begun = text.removeprefix("\ufeff"), True
            if not block:
                break
            cut = text.rfind("\n") + 1
            if cut:
                yield "".join([*pending, text[:cut]])
                pending = []
            pending.append(text[cut:])
            if not whole_lines and sum(map(len, pending)) > LONGEST:
                *pieces, rest = cut_long("".join(pending))
                yield from pieces
                pending = [rest]
    if any(pending):
        yield "".join(pending)


def cut_long(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most ``LONGEST`` characters.

    Each cut is after a line end if possible, else before a space, else anywhere.
    """
    start = 0
    while len(text) - start > LONGEST:
        end = text.rfind("\n", start, start + LONGEST) + 1 or text.rfind(" ", start + 1, start + LONGEST)
        end = end if end > start else start + LONGEST
        yield text[start:end]
        start = end
    yield text[start:]


def _open(path: Path) -> Any:
    try:
        check_regular(path, str(path))
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None

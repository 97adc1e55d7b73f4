"""Read documents from text files and JSONL files, and raise errors for invalid content."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError, is_utf8
from shoestring.data.progress import advance, working
from shoestring.files.read_file import check_regular

CHUNK = 1 << 20  # number of bytes read from a file at once, so that files of any size need little memory
LONGEST = 4 << 20  # maximum number of characters tokenised at once; longer lines and records are cut
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def find_files(paths: list[Path], pattern: str = "*") -> list[Path]:
    """Return the files named by ``paths``.

    A directory in ``paths`` stands for all files below it that match ``pattern``. Hidden files and empty
    files in a directory are left out. The files of a directory are sorted, so that the order is the same on
    every machine.

    Raises:
        InputError: a path does not exist, a directory has no match, or a file is empty.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            try:
                inside = sorted(
                    p for p in path.rglob(pattern) if p.is_file() and not _hidden(p.relative_to(path))
                )
            except (ValueError, NotImplementedError, IndexError) as error:
                raise InputError(f"--glob {pattern}: expected a pattern such as '*.py' ({error})") from None
            inside = [p for p in inside if p.stat().st_size > 0]
            if not inside:
                raise InputError(f"--data {path}: no non-empty file matches '{pattern}' in this directory")
            files.extend(inside)
        elif path.is_file():
            if path.stat().st_size == 0:
                raise InputError(f"--data {path}: the file is empty")
            files.append(path)
        else:
            raise InputError(f"--data {path}: no such file or directory")
    if not files:
        raise InputError("--data: no file given")
    for path in files:
        if not is_utf8(str(path)):
            raise InputError(f"--data {str(path)!a}: expected a name in UTF-8; rename the file")
    return list(dict.fromkeys(files))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_jsonl(path: Path) -> bool:
    """Return whether the file name ends in .jsonl or .ndjson."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


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
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = consumed - held + error.start
                raise InputError(
                    f"{path}: not UTF-8 at byte {offset} ({error.reason}); convert the file to UTF-8"
                ) from None
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


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) for each line of a JSONL file; skip blank lines."""
    number = 0
    for piece in read_text(path, whole_lines=True):
        for line in piece.split("\n") if not piece.endswith("\n") else piece[:-1].split("\n"):
            number += 1
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if ESCAPED_SURROGATE.search(line):
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise InputError(
                    f"{path}: line {number} holds {half}, half of a character; mend the record"
                ) from None
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is not valid JSON ({error})") from None
            except ValueError:  # Python raises ValueError for integers of more than a few thousand digits
                raise InputError(
                    f"{path}: line {number} holds an integer of too many digits; remove it"
                ) from None
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number} is not a JSON object but {type(record).__name__}")
            yield number, record


def documents(path: Path) -> Iterator[Iterator[str]]:
    """Yield the documents of one file, each as pieces of text.

    A text file is one document. A JSONL file has one document per line.
    """
    if not is_jsonl(path):
        yield read_text(path)
        return
    for number, record in read_jsonl(path):
        if "text" not in record:
            raise InputError(f'{path}: line {number} has no "text" string; its fields are {sorted(record)}')
        if not isinstance(record["text"], str):
            raise InputError(
                f'{path}: line {number}: expected a string "text", got {kind_of_value(record["text"])}'
            )
        yield cut_long(record["text"])


def kind_of_value(value: object) -> str:
    """Return the JSON type of a value as a phrase for error messages, such as "a list"."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def size_of(files: list[Path]) -> int:
    """Return the total size of the files in bytes."""
    return sum(path.stat().st_size for path in files)


def check_text(files: list[Path]) -> int:
    """Read all files once and return the number of characters.

    If this function is called before training, it raises errors for bad input before anything is written.
    """
    with working("reading", size_of(files)):
        characters = sum(len(piece) for path in files for document in documents(path) for piece in document)
    if characters == 0:
        raise InputError(f"--data {files[0]}: no text in the {len(files)} file(s)")
    return characters

"""Documents from text files and JSONL, checked while they are read."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring.data.errors import InputError

CHUNK = 1 << 20  # bytes read at once, so that a file of any size needs little memory


def find_files(paths: list[Path], pattern: str = "*") -> list[Path]:
    """Return the files named by ``paths``; a directory stands for its files that match ``pattern``, recursively.

    Hidden files and empty files of a directory are left out; the order is sorted, so that it is the same everywhere.
    Raises InputError for a path that does not exist, a directory without a match, or a file without a byte.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob(pattern) if p.is_file() and not _hidden(p.relative_to(path)))
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
    return list(dict.fromkeys(files))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_jsonl(path: Path) -> bool:
    """JSON lines are told by the name: .jsonl or .ndjson."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of about a mebibyte that end at a line end where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed, pending = 0, ""
    with _open(path) as file:
        while True:
            block = file.read(CHUNK)
            held = len(decoder.getstate()[0])  # bytes of an unfinished character, counted from the block before
            try:
                pending += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = consumed - held + error.start
                raise InputError(
                    f"{path}: not UTF-8 at byte {offset} ({error.reason}); convert the file to UTF-8"
                ) from None
            consumed += len(block)
            if not block:
                break
            cut = pending.rfind("\n") + 1
            if cut:
                yield pending[:cut]
                pending = pending[cut:]
    if pending:
        yield pending


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) of a JSONL file; blank lines are skipped."""
    number = 0
    for piece in read_text(path):
        for line in piece.split("\n") if not piece.endswith("\n") else piece[:-1].split("\n"):
            number += 1
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is not valid JSON ({error})") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number} is not a JSON object but {type(record).__name__}")
            yield number, record


def documents(path: Path) -> Iterator[Iterator[str]]:
    """Yield the documents of one file, each as pieces of text: a text file is one, a JSONL file has one a line."""
    if not is_jsonl(path):
        yield read_text(path)
        return
    for number, record in read_jsonl(path):
        text = record.get("text")
        if not isinstance(text, str):
            raise InputError(f'{path}: line {number} has no "text" string; its fields are {sorted(record)}')
        yield iter((text,))


def check_text(files: list[Path]) -> int:
    """Read everything once, so that bad input is found before anything is written; return the number of characters."""
    characters = sum(len(piece) for path in files for document in documents(path) for piece in document)
    if characters == 0:
        raise InputError(f"--data {files[0]}: no text in the {len(files)} file(s)")
    return characters

"""Read the JSON records of a file: the objects of a JSONL file, or those of a JSON file, in a list or one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.data.lines import read_text
from shoestring.files.read_file import shown

TEXT, COMPLETION, CHAT = "text", "prompt/completion", "chat"
# Kinds of records, each with the fields that a record of it has.
KINDS = {CHAT: ("messages",), COMPLETION: ("prompt", "completion"), TEXT: ("text",)}
EXPECTED = 'expected "text", "prompt" and "completion", or "messages"'
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
AS_JSON = "if the file holds a list of records, or records over several lines, let its name end in .json"
SPACE = re.compile(r"[ \t\r\n]*")


def holds_records(path: Path) -> bool:
    """Return whether the file's name says that it holds JSON records. Every other file is text."""
    return path.suffix.lower() in (".jsonl", ".ndjson", ".json")


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where the record is, record) for each JSON object of a file.

    A JSONL file has one object in each line; blank lines are skipped. A JSON file has a list of objects, or objects
    one after the other.

    Raises:
        InputError: the file is not UTF-8, or holds something else; the message has the place.
    """
    parse = _json if path.suffix.lower() == ".json" else _lines
    for where, text, record in parse(path):
        if not isinstance(record, dict):
            more = f"; {AS_JSON}" if isinstance(record, list) and parse is _lines else ""
            raise InputError(f"{where} is not a JSON object but {kind_of_value(record)}{more}")
        if ESCAPED_SURROGATE.search(text):
            _check_surrogates(record, where)
        yield where, record


def _lines(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (where, text, record) for each line of a JSON Lines file."""
    number = 0
    for piece in read_text(path, whole_lines=True):
        for line in piece.split("\n") if not piece.endswith("\n") else piece[:-1].split("\n"):
            number += 1
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                record = parse_record(line, where)
            except InputError as error:
                if number > 1 or not (line.lstrip().startswith("[") or line.strip() == "{"):
                    raise
                raise InputError(f"{error}; {AS_JSON}") from None
            yield where, line, record


def _json(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (where, text, value) for each value of a JSON file, or of the list that it holds."""
    scan = _Scan(read_text(path, whole_lines=True))
    in_list = scan.take("[")
    number = 0
    while True:
        if in_list and scan.take("]"):
            if scan.peek():
                raise InputError(
                    f"{path}: expected one list of records, got {shown(scan.peek())} after its end"
                )
            return
        if not scan.peek():
            if in_list:
                raise InputError(f"{path}: the list of records has no end: the file is cut off")
            return
        if in_list and number and not scan.take(","):
            raise InputError(f"{path}: expected a comma after record {number}, got {shown(scan.peek())}")
        number += 1
        where = f"{path}: record {number}"
        yield where, *scan.value(where)


class _Scan:
    """Parse JSON values one by one from pieces of text, of which few are in memory at once."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._text, self._at = "", 0

    def _read(self) -> bool:
        """Add text, at least as much as there is; return whether there was any."""
        added: list[str] = []
        missing = len(self._text) - self._at
        while piece := next(self._pieces, ""):
            added.append(piece)
            missing -= len(piece)
            if missing <= 0:
                break
        self._text, self._at = self._text[self._at :] + "".join(added), 0
        return bool(added)

    def peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            spaces = SPACE.match(self._text, self._at)
            assert spaces is not None
            self._at = spaces.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def take(self, mark: str) -> bool:
        """Pass over a character, if it is the next one."""
        is_next = self.peek() == mark
        self._at += is_next
        return is_next

    def value(self, where: str) -> tuple[str, Any]:
        """Return the text of the next value, and the value."""
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError, RepeatedFieldError) as error:
                # the end of the value may be in the next piece
                if isinstance(error, RepeatedFieldError) or not self._read():
                    parse_record(self._text[self._at :], where)  # raises InputError
                    raise
        text, self._at = self._text[self._at : end], end
        return text, value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; raise RepeatedFieldError if it names a field twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedFieldError(next(name for name in names if names.count(name) > 1))
    return fields


class RepeatedFieldError(Exception):
    """Raised if an object names a field twice, so that one of the values would be lost."""


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_record(text: str, where: str) -> Any:
    """Parse the JSON text of a record; ``where`` is the beginning of error messages."""
    try:
        return DECODER.decode(text)
    except RepeatedFieldError as error:
        raise InputError(
            f"{where}: the field {shown(str(error))} appears twice; remove one of them"
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON ({error})") from None
    except ValueError:  # Python raises ValueError for integers of more than a few thousand digits
        raise InputError(f"{where} holds an integer of too many digits; remove it") from None


def _check_surrogates(record: dict[str, Any], where: str) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise InputError(f"{where} holds {half}, half of a character; mend the record") from None


def kind_of_record(record: dict[str, Any]) -> str | None:
    """Return the kind of a record, or None if it has the fields of no kind."""
    return next((kind for kind, fields in KINDS.items() if all(name in record for name in fields)), None)


def kind_of_file(path: Path) -> str:
    """Return the kind of the first record of a file; text for a file of text.

    Raises:
        InputError: the file has no record, or its first one has the fields of no kind.
    """
    if not holds_records(path):
        return TEXT
    for where, record in read_records(path):
        kind = kind_of_record(record)
        if kind is None:
            raise UnknownFieldsError(
                f"{where} has the fields {shown(sorted(record))}; {EXPECTED}{list_inside(record)}"
            )
        return kind
    raise InputError(f"{path}: no record in the file")


class UnknownFieldsError(InputError):
    """Raised for a JSON file whose first record has the fields of no kind."""


def list_inside(record: dict[str, Any]) -> str:
    """Return advice for an object around a list of records, such as {"data": [...]}."""
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"; the field {shown(name)} has a list of {len(value)} objects: if these are the records, write them to a file of their own"
    return ""


def kind_of(files: list[Path]) -> str:
    """Return the kind of records in the files: text, prompt/completion or chat.

    The first record of each file determines the kind.

    Raises:
        InputError: the files hold records of different kinds, or records of an unknown kind.
    """
    kinds = {path: kind_of_file(path) for path in files}
    first = next(iter(kinds.values()))
    for path, kind in kinds.items():
        if kind != first:
            raise InputError(
                f"{path}: holds {kind} records, {files[0]} holds {first}; give one kind at a time, in a folder with --glob"
            )
    return first


def kind_of_value(value: object) -> str:
    """Return the JSON type of a value as a phrase for error messages, such as "a list"."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")

"""Find the data files of a command, and read their documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from shoestring.core.errors import InputError, is_utf8
from shoestring.data.fields import check_fields
from shoestring.data.formats import looks_like_json, why_unsupported
from shoestring.data.lines import cut_long, read_text
from shoestring.data.progress import working
from shoestring.data.records import (
    TEXT,
    UnknownFieldsError,
    holds_records,
    kind_of_file,
    kind_of_record,
    kind_of_value,
    list_inside,
    read_records,
)
from shoestring.files.read_file import shown

MOST_NAMED = 10  # maximum number of files of a directory that are named because they are left out


def find_files(paths: list[Path], pattern: str = "*", tell: Callable[[str], None] = print) -> list[Path]:
    """Return the files named by ``paths``.

    A directory in ``paths`` stands for all files below it that match ``pattern``. Hidden files and empty
    files in a directory are left out. So are files that hold neither text nor records; ``tell`` gets a line for each, and
    one if text looks like records.
    The files of a directory are sorted, so that the order is the same on every machine.

    Raises:
        InputError: a path does not exist, a directory has no file that can be read, or a file is empty or holds
            neither text nor records.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(_files_in(path, pattern, tell))
        elif path.is_file():
            if path.stat().st_size == 0:
                raise InputError(f"--data {path}: the file is empty")
            why = why_unsupported(path)
            if why is not None:
                raise InputError(f"--data {path}: {why}")
            files.append(path)
        else:
            raise InputError(f"--data {path}: no such file or directory")
    if not files:
        raise InputError("--data: no file given")
    for path in files:
        if not is_utf8(str(path)):
            raise InputError(f"--data {str(path)!a}: expected a name in UTF-8; rename the file")
    files = list(dict.fromkeys(files))
    like_json = [path for path in files if not holds_records(path) and looks_like_json(path)]
    if like_json:
        more = f" (and {len(like_json) - 1} more files)" if len(like_json) > 1 else ""
        tell(
            f"{like_json[0]}{more}: read as text, but begins as JSON does; for records, let the name end in .jsonl or .json"
        )
    return files


def _files_in(folder: Path, pattern: str, tell: Callable[[str], None]) -> list[Path]:
    try:
        inside = sorted(
            p for p in folder.rglob(pattern) if p.is_file() and not _hidden(p.relative_to(folder))
        )
    except (ValueError, NotImplementedError, IndexError) as error:
        raise InputError(f"--glob {pattern}: expected a pattern such as '*.py' ({error})") from None
    inside = [p for p in inside if p.stat().st_size > 0]
    if not inside:
        raise InputError(f"--data {folder}: no non-empty file matches '{pattern}' in this directory")
    reasons = {path: _why_left_out(path) for path in inside}
    left_out = [(path, why) for path, why in reasons.items() if why is not None]
    if len(left_out) == len(inside):
        first, why = left_out[0]
        raise InputError(
            f"--data {folder}: no file that matches '{pattern}' in this directory can be read; {first}: {why}"
        )
    for path, why in left_out[:MOST_NAMED]:
        tell(f"left out {path}: {why}")
    if len(left_out) > MOST_NAMED:
        tell(f"left out {len(left_out) - MOST_NAMED} more files of {folder}; choose files with --glob")
    return [path for path in inside if reasons[path] is None]


def _why_left_out(path: Path) -> str | None:
    """Return why a file of a directory is left out, or None. Damage is no reason, but an error when it is read."""
    why = why_unsupported(path)
    if why is None and holds_records(path):
        try:
            kind_of_file(path)
        except UnknownFieldsError as error:
            return str(error).removeprefix(f"{path}: ")
        except InputError:
            return None
    return why


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def documents(path: Path) -> Iterator[Iterator[str]]:
    """Yield the documents of one file, each as pieces of text.

    A text file is one document. A file of JSON records has a document in the field "text" of each record.
    """
    if not holds_records(path):
        yield read_text(path)
        return
    for where, record in read_records(path):
        if "text" not in record:
            kind = kind_of_record(record)
            other = (
                f"; `shoestring finetune` trains on {kind} records, one kind at a time"
                if kind
                else list_inside(record)
            )
            raise InputError(f'{where} has no "text" string; its fields are {shown(sorted(record))}{other}')
        if not isinstance(record["text"], str):
            raise InputError(f'{where}: expected a string "text", got {kind_of_value(record["text"])}')
        check_fields(record, TEXT, where)
        yield cut_long(record["text"])


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

"""Digests of the files on which the results of a run depend, which a resumed run compares."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.data.progress import advance, working
from shoestring.files.atomic import write_json
from shoestring.files.read_file import read_json

PART = 64 << 20  # number of bytes that a thread reads at once; a digest is that of the digests of the parts
BLOCK = 1 << 20
# A digest of weights in a file of more than LARGE bytes covers the first part, which has names and shapes, and one block
# of each STRIDE bytes, a sample of the values. Reading all of them would take as long as loading the model.
LARGE = 256 << 20
STRIDE = 64 << 20
THREADS = min(8, os.cpu_count() or 1)
# Endings of the files of a model directory from which weights, configuration, tokenizer, chat template and code come.
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken", ".py")
PREPARED = "prepared.json"  # holds the digests of the files that a run has prepared


def file_list(files: list[Path]) -> list[list[Any]]:
    """Return the name, the size in bytes and the digest of the contents of each file; of large weights, of a sample.

    A resumed run must have the same list.
    """
    parts = [part for path in files for part in _parts(path)]
    totals = {path: hashlib.sha256() for path in files}
    with (
        working("reading files to tell whether they change", sum(count for _, _, count in parts)),
        ThreadPoolExecutor(THREADS) as pool,
    ):
        for (path, _, count), digest in zip(parts, pool.map(_digest_of_part, parts)):
            totals[path].update(digest)
            advance(count)
    return [[path.name, path.stat().st_size, totals[path].hexdigest()[:32]] for path in files]


def _parts(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (path, first byte, number of bytes) of the parts of a file that its digest covers."""
    size = path.stat().st_size
    is_sampled = path.suffix == ".safetensors" and size > LARGE
    for begin in range(0, max(1, size), STRIDE if is_sampled else PART):
        yield path, begin, min(BLOCK if is_sampled and begin > 0 else PART, size - begin)


def _digest_of_part(part: tuple[Path, int, int]) -> bytes:
    path, begin, count = part
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(begin)
        while count > 0 and (block := file.read(min(BLOCK, count))):
            hasher.update(block)
            count -= len(block)
    return hasher.digest()


def model_files(folder: Path) -> list[list[Any]]:
    """Return :func:`file_list` of the files of a model directory on which the model and its tokenizer depend."""
    return file_list(
        sorted(path for path in folder.iterdir() if path.suffix in MODEL_FILES and path.is_file())
    )


def require_prepared(run: Path, names: list[str]) -> None:
    """Record the digests of the files or directories that a run has prepared; compare them if it is resumed.

    Raises:
        InputError: a file has changed since the run prepared it.
    """
    files = {str(path.relative_to(run)): path for name in names for path in _files(run / name)}
    digests = dict(zip(files, (digest for _, _, digest in file_list(list(files.values())))))
    record = run / PREPARED
    if not record.is_file():
        write_json(record, digests)
        return
    recorded = read_json(record, str(record))
    if not isinstance(recorded, dict):
        raise InputError(f"{record}: not the record of a run; give another --out")
    for name in sorted(digests.keys() | recorded.keys()):
        if digests.get(name) != recorded.get(name):
            raise InputError(
                f"--resume {run}: {name} has changed since the run began: restore it, or give another --out"
            )


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or all files in a folder, or nothing if the path does not exist."""
    if path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())
    elif path.is_file():
        yield path

"""Write and read metrics.jsonl, which has one line per training step.

A run that resumes from a checkpoint first removes the lines of later steps.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.files.atomic import atomic_file
from shoestring.files.write_file import naming, write_all

# Fields of every line of metrics.jsonl. `rss` and `peak` are the resident memory and its peak, in bytes.
COLUMNS = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "seconds",
    "tokens_per_second",
    "rss",
    "peak",
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; skip lines that are damaged or were cut off when a process died."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and all(
            isinstance(row.get(name), (int, float)) for name in (*COLUMNS, *row)
        ):
            rows.append(row)
    return rows


class MetricsLog:
    """Append one row per step to ``path``; rows of steps after ``keep_through`` are removed first.

    The null device as the path keeps nothing.
    """

    def __init__(self, path: Path, keep_through: int) -> None:
        self._path = path
        if path == Path(os.devnull):
            self.lost = 0
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (__exit__ closes it)
            return
        kept_rows = [row for row in read_metrics(path) if row["step"] <= keep_through]
        # Number of steps up to `keep_through` whose rows are missing, because the metrics file was damaged.
        self.lost = keep_through - len({row["step"] for row in kept_rows})
        with atomic_file(path) as file:
            file.write("".join(json.dumps(row) + "\n" for row in kept_rows).encode())
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (__exit__ closes it)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row.

        Raises:
            OSError: the row cannot be written. The file has the rows before it then, and no part of this one.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            with naming(self._path):
                write_all(self._file.fileno(), (json.dumps(row) + "\n").encode())
        except BaseException:
            # The row after a part of a row would be lost with it.
            with suppress(OSError):
                self._file.truncate(size)
            raise

    def sync(self) -> None:
        """Sync the file to disk before a checkpoint is saved, so that it contains all steps so far."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

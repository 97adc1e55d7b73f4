"""Read the tensors of a model directory one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import printable
from shoestring.files.read_file import read_json, shown
from shoestring.files.safetensors_file import open_safetensors
from shoestring.integrations.transformers.conversions import Conversion


@dataclass(frozen=True)
class Stored:
    """The file of a stored tensor, and its name, shape and dtype there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Made:
    """A tensor of a model that is made of stored tensors by a rule of transformers."""

    name: str
    shape: tuple[int, ...]
    conversion: Conversion
    stored: Mapping[str, Stored]  # the tensors of the files
    model: Any


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json of a model directory.

    Raises:
        ValueError: the file is missing, or is not a JSON object.
    """
    config = directory / "config.json"
    try:
        fields = read_json(config, str(config))
    except FileNotFoundError:
        raise ValueError(
            f"{directory}: no config.json there; expected a Hugging Face model directory. Download a model of the "
            "Hub first"
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(f"{config}: expected a JSON object, received {type(fields).__name__}")
    return fields


def _weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    # A save of one file over shards may be killed before it has removed the index. transformers and C++ then read the
    # file as well.
    if os.path.lexists(single):
        return [single]
    if os.path.lexists(index):
        return _sharded(directory, index)
    raise ValueError(
        f"{directory}: no weights there (model.safetensors or its sharded index); only safetensors are read"
    )


def _sharded(directory: Path, index: Path) -> list[Path]:
    """Return the files that an index of sharded weights names."""
    where = f"{index}: not a valid index of sharded weights"
    try:
        fields = read_json(index, where)
    except FileNotFoundError:
        raise ValueError(f"{where}: a link to a file that is not there") from None
    files = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(
            f"{index}: not a valid index of sharded weights: expected weight_map, an object from tensor "
            "names to file names"
        )
    names = sorted(set(files.values()))
    for name in names:
        # Refuse file names that contain a folder, because they could point anywhere on the disk.
        if Path(name).name != name or "\0" in name or not os.path.lexists(directory / name):
            raise ValueError(f"{index}: names the weight file {shown(name)}, which is not in the directory")
    return [directory / name for name in names]


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Return where each tensor of a model directory is stored, by name, without reading weights.

    Raises:
        ValueError: a file is missing or damaged, or two files hold a tensor of the same name.
    """
    stored: dict[str, Stored] = {}
    for file in _weight_files(directory):
        for name, tensor in _open(file).tensors().items():
            if name in stored:
                raise ValueError(
                    f"{file}: {printable(name)} is in {stored[name].file.name} as well; expected it in one file"
                )
            stored[name] = Stored(file, name, tuple(tensor.shape), tensor.dtype)
    return stored


def _open(file: Path) -> Any:
    damaged = f"{file}: not a valid safetensors file"
    try:
        return open_safetensors(file, damaged)
    except FileNotFoundError as error:
        raise ValueError(f"{damaged} ({error.strerror})") from None


class TensorReader:
    """A context manager that reads tensors by name from files, and closes the files at the end."""

    def __init__(self, stored: Mapping[str, Stored | Made]) -> None:
        self.stored = stored
        self._files: dict[Path, Any] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._waiting: dict[str, Tensor] = {}  # made beside others, and not read yet

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._waiting.clear()

    def read(self, name: str) -> Tensor:
        """Read a tensor into new CPU memory, in the dtype that it has in the file."""
        stored = self.stored[name]
        return self._make(stored) if isinstance(stored, Made) else self._load(stored)

    def borrow(self, name: str) -> Tensor:
        """Read a tensor into a buffer that the next call of ``borrow`` overwrites.

        The reader has a single such buffer, which grows to the size of the largest tensor.
        """
        stored = self.stored[name]
        if isinstance(stored, Made):
            return self._make(stored)
        size = math.prod(stored.shape) * stored.dtype.itemsize
        if self._buffer.numel() < size:
            # Free the old buffer before the larger one is allocated.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(size, dtype=torch.uint8)
        tensor = self._buffer[:size].view(stored.dtype).view(stored.shape)
        self._file(stored).load_into(stored.name, tensor)
        return tensor

    def slabs(self, name: str) -> Iterator[Tensor]:
        """Yield the matrices of a stack one after the other, each of shape (1, ...), or together if a rule needs it."""
        stored = self.stored[name]
        if isinstance(stored, Made):
            yield from stored.conversion.slabs(lambda one: self._load(stored.stored[one]), stored.model)
            return
        stack = self._file(stored).map(stored.name)
        for e in range(stack.shape[0]):
            yield stack[e : e + 1]

    def _load(self, stored: Stored) -> Tensor:
        tensor: Tensor = self._file(stored).load(stored.name)
        return tensor

    def _make(self, made: Made) -> Tensor:
        if made.name not in self._waiting:
            self._waiting |= made.conversion.make(lambda one: self._load(made.stored[one]), made.model)
        return self._waiting.pop(made.name)

    def _file(self, stored: Stored) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = _open(stored.file)
        return self._files[stored.file]

"""Read the tensors of a model directory one at a time.

Files are read and not memory-mapped, because mapped pages count as memory of the process, while the system's
page cache does not.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoestring.files.read_file import check_regular, read_json, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """The file, position, shape and dtype of a stored tensor."""

    file: Path
    offset: int  # position of the tensor in bytes, from the start of the file
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # dtype of the tensor; None if TensorReader does not support it


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
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if os.path.lexists(index):
        return _sharded(directory, index)
    if os.path.lexists(single):
        return [single]
    raise ValueError(
        f"{directory}: no weights there (model.safetensors or its sharded index); only safetensors are read"
    )


def _sharded(directory: Path, index: Path) -> list[Path]:
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

    The safetensors reader checks header size, offsets, overlaps, sizes and the file's length.

    Raises:
        ValueError: a file is missing or damaged, or two files hold a tensor of the same name.
    """
    from safetensors import safe_open

    found: dict[str, Stored] = {}
    for file in _weight_files(directory):
        try:
            check_regular(file, str(file))
            with safe_open(file, "pt"):
                pass
            with open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except Exception as error:
            # Catch any exception: not every version of safetensors exports SafetensorError, and unreadable
            # files raise OSError.
            raise ValueError(f"{file}: not a valid safetensors file ({shown(str(error))})") from None
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in found:
                raise ValueError(
                    f"{file}: {name} is in {found[name].file.name} as well; expected it in one file"
                )
            begin = 8 + size + entry["data_offsets"][0]
            found[name] = Stored(file, begin, tuple(entry["shape"]), DTYPES.get(entry["dtype"]))
    return found


class TensorReader:
    """A context manager that reads tensors by name from files, and closes the files at the end."""

    def __init__(self, stored: dict[str, Stored]) -> None:
        self.stored = stored
        self._descriptors: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str) -> Tensor:
        """Read a tensor into new CPU memory, in the dtype that it has in the file."""
        return self._fill(name, torch.empty(self._size(name), dtype=torch.uint8))

    def borrow(self, name: str) -> Tensor:
        """Read a tensor into a buffer that the next call of ``borrow`` overwrites.

        The reader has a single such buffer, which grows to the size of the largest tensor.
        """
        size = self._size(name)
        if self._buffer.numel() < size:
            # Free the old buffer before the larger one is allocated.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._fill(name, self._buffer[:size])

    def _size(self, name: str) -> int:
        stored = self.stored[name]
        if stored.dtype is None:
            raise ValueError(
                f"{stored.file}: {name}: expected a dtype among {', '.join(DTYPES)}, received another"
            )
        return math.prod(stored.shape) * stored.dtype.itemsize

    def _fill(self, name: str, room: Tensor) -> Tensor:
        stored = self.stored[name]
        assert stored.dtype is not None
        descriptor = self._descriptors.get(stored.file)
        if descriptor is None:
            descriptor = self._descriptors[stored.file] = os.open(stored.file, os.O_RDONLY)
        bytes_, done = memoryview(room.numpy()), 0  # type: ignore[arg-type]  # numpy declares Buffer from Python 3.12 on
        while done < len(bytes_):  # loop, because Linux reads at most 2 GiB per call
            count = os.preadv(descriptor, [bytes_[done:]], stored.offset + done)
            if count == 0:
                raise ValueError(f"{stored.file}: {name}: the file ends before the tensor does")
            done += count
        # A torch.bool element whose byte is neither 0 nor 1 would cause undefined behaviour in later
        # operators.
        if stored.dtype == torch.bool and bool((room > 1).any()):
            raise ValueError(f"{stored.file}: {name}: expected bytes 0 and 1 for BOOL, received others")
        return room.view(stored.dtype).view(stored.shape)

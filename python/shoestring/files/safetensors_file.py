"""Read and write safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import InputError
from shoestring.files.read_file import check_regular


def open_safetensors(path: str | os.PathLike[str], damaged: str) -> Any:
    """Open a safetensors file and check its whole header: size, dtypes, shapes, offsets and the file's length.

    Tensors are read and, but for ``map``, not memory-mapped, because mapped pages count as memory of the process, while the
    system's page cache does not.

    Args:
        path: the file.
        damaged: the beginning of the error message for a file that is damaged.

    Returns:
        An object that closes the file when it is freed. ``tensors()`` is a dict from the name of each tensor
        to a meta tensor of its shape and dtype. ``metadata()`` is a dict of strings. ``load(name)`` reads a
        tensor into new CPU memory, and ``load_into(name, tensor)`` into an existing tensor. ``map(name)`` is for a
        process that needs a part of a tensor: it maps the file, of which only the pages that are read are loaded.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is damaged, or is not a regular file.
    """
    check_regular(path, os.fspath(path))
    try:
        return torch.classes.shoestring.SafetensorsFile(os.fsencode(path))
    except ValueError as error:
        reason = str(error).removeprefix(f"safetensors: {os.fspath(path)}: ")
        raise InputError(f"{damaged} ({reason})") from None


@dataclass(frozen=True)
class Gathered:
    """A tensor of a file of which this process has a part.

    Attributes:
        like: a tensor on the meta device of the dtype and shape.
        whole: returns the tensor. All processes that have parts must call it.
    """

    like: Tensor
    whole: Callable[[], Tensor]


def save_gathered(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor | Gathered],
    metadata: Mapping[str, str],
    *,
    writes: bool,
) -> None:
    """Save tensors as ``save_safetensors`` does.

    Of the tensors that processes have in parts, each has one whole tensor at a time.

    Args:
        path: the file.
        tensors: the tensors, by name.
        metadata: the value of ``__metadata__`` in the header.
        writes: whether this process writes the file. The others give their parts.

    Raises:
        ValueError: see ``save_safetensors``.
        OSError: the file cannot be written. An existing file is unchanged then.
    """
    used = _used(tensors, writes)
    likes = [t.like if isinstance(t, Gathered) else t for t in used.values()]
    writer = torch.classes.shoestring.SafetensorsWriter()
    arguments = "save_safetensors", os.fsencode(path), list(used), likes
    order = torch.classes.shoestring.SafetensorsWriter.order(*arguments)
    error = writer.open(*arguments, dict(metadata)) if writes else 0
    for name in order:
        # Other processes give their parts, also after an error.
        if error == 0 or isinstance(used[name], Gathered):
            tensor = _whole(used[name])
            error = writer.write(tensor) if writes and error == 0 else error
    if writes and error == 0:
        error = writer.commit()
    if error:
        raise OSError(error, os.strerror(error), os.fspath(path))


def checksum_of(
    tensors: Mapping[str, Tensor | Gathered], metadata: Mapping[str, str], *, writes: bool
) -> str:
    """Return the checksum of what ``save_gathered`` with these arguments writes. All processes call it."""
    used = _used(tensors, writes)
    checksum = torch.classes.shoestring.ContentChecksum(dict(metadata))
    for name in sorted(used, key=os.fsencode):
        checksum.add(name, _whole(used[name]))
    text: str = checksum.text()
    return text


def _used(tensors: Mapping[str, Tensor | Gathered], writes: bool) -> Mapping[str, Tensor | Gathered]:
    """Return the tensors that this process must visit: all if it writes, else those that all processes gather."""
    return tensors if writes else {name: t for name, t in tensors.items() if isinstance(t, Gathered)}


def _whole(tensor: Tensor | Gathered) -> Tensor:
    return tensor.whole() if isinstance(tensor, Gathered) else tensor


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Save tensors to a safetensors file. An existing file is replaced once the new one is complete and on disk.

    Contiguous CPU tensors are not copied; other tensors are copied one at a time. If a tensor is memory-mapped
    from a file, its pages are dropped from memory after the tensor has been written.

    Args:
        path: the file.
        tensors: the tensors, by name.
        metadata: the value of ``__metadata__`` in the header.

    Raises:
        ValueError: safetensors has no dtype for a tensor, or a name or the metadata is not valid Unicode.
        OSError: the file cannot be written. An existing file is unchanged then.
    """
    error = torch.ops.shoestring._save_safetensors(
        os.fsencode(path), list(tensors), list(tensors.values()), dict(metadata)
    )
    if error:
        raise OSError(error, os.strerror(error), os.fspath(path))

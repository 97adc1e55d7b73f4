"""Write safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor


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

"""Averages of the tensors of several checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def average_checkpoints(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    weights: Sequence[float] | None = None,
) -> None:
    """Average the tensors of several checkpoints, and write them to the safetensors file ``out``.

    Tensors in fp32, bf16 and fp16 are summed in fp32, and tensors in fp64 are summed in fp64. The result has
    the dtype of the checkpoints. Tensors of other dtypes, such as integers and quantised weights, must be equal
    in all checkpoints, and are copied. The metadata is that of the first file.

    Tensors are read one at a time. Memory: the largest tensor in its own dtype, and once more in fp32 or fp64.

    Args:
        paths: safetensors files, or model directories with ``model.safetensors`` or with shards and
            ``model.safetensors.index.json``.
        out: the file to write. An existing file is replaced once the new one is complete and on disk. It may
            be one of the files that are read.
        weights: the factor of each checkpoint. Their sum must be 1 within 1e-6. None means equal factors.

    Raises:
        ValueError: the checkpoints differ in the names, shapes or dtypes of tensors, or in tensors that cannot
            be averaged; or a file is damaged; or ``weights`` does not fit. Nothing has been written then.
        OSError: a file cannot be read or written. An existing file ``out`` is unchanged then.

    Example:
        >>> from safetensors.torch import load_file, save_file
        >>> save_file({"weight": torch.tensor([1.0, 2.0])}, "step-100.safetensors")
        >>> save_file({"weight": torch.tensor([3.0, 6.0])}, "step-200.safetensors")
        >>> paths = ["step-100.safetensors", "step-200.safetensors"]
        >>> shoestring.optim.average_checkpoints(paths, "average.safetensors")
        >>> load_file("average.safetensors")["weight"]
        tensor([2., 4.])
        >>> shoestring.optim.average_checkpoints(paths, "average.safetensors", weights=[0.25, 0.75])
        >>> load_file("average.safetensors")["weight"]
        tensor([2.5000, 5.0000])
    """
    for path in paths:
        os.stat(path)  # raises FileNotFoundError, which the library reports as a ValueError
    error = torch.ops.shoestring._average_checkpoints(
        [os.fsencode(path) for path in paths], os.fsencode(out), None if weights is None else list(weights)
    )
    if error:
        raise OSError(error, os.strerror(error), os.fspath(out))

"""Write a safetensors file tensor by tensor, without copies of contiguous CPU tensors.

If a tensor is memory-mapped from a file, its pages are dropped from memory after the tensor has been written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# The dtypes, sorted by decreasing element size. Tensors are written in this order, so every tensor in the
# file is aligned to the size of its elements.
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a new safetensors file.

    The write is not atomic; use :func:`shoestring.files.atomic.atomic_path` for that. Tensors that are not on
    the CPU, or not contiguous, are copied one at a time.

    Args:
        path: the file.
        tensors: the tensors, by name.
        metadata: the value of ``__metadata__`` in the header.

    Raises:
        ValueError: the dtype of a tensor is not in ``DTYPES``.
        OSError: the file cannot be written.
    """
    order = list(DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"write_safetensors: {name}: expected one of {known}, received {tensor.dtype}")
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # spaces pad the header, so that the data starts at a multiple of 8 bytes
    with open(path, "wb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            while part:
                part = part[file.write(part) :]
        for name in names:
            error = torch.ops.shoestring._write_tensor(
                file.fileno(), tensors[name].detach().cpu().contiguous()
            )
            if error:
                raise OSError(error, os.strerror(error), str(path))

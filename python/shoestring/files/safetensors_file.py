"""A safetensors file, written tensor by tensor: none of them is copied, and none stays in memory that lies on a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

# The widest first, as files have them: then every tensor begins at a multiple of its elements' size.
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new file; whole or not is the caller's affair. A tensor of another device is copied while it is written.

    Raises:
        ValueError: a tensor of a dtype that is not in ``DTYPES``.
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
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with open(path, "wb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            while part:
                part = part[file.write(part) :]
        for name in names:
            error = torch.ops.shoestring.write_tensor(
                file.fileno(), tensors[name].detach().cpu().contiguous()
            )
            if error:
                raise OSError(error, os.strerror(error), str(path))

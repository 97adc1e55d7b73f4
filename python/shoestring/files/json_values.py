"""Nested values of Python as JSON, from which each comes back with its type."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
SEQUENCES: dict[str, type] = {"tuple": tuple, "Size": torch.Size}
# NumPy's scalars that a Python number holds exactly.
SCALARS = {"bool", "float16", "float32", "float64"} | {
    f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)
}


def is_stored(tensor: Tensor) -> bool:
    """Return whether a file can hold a tensor: it has its own memory, in strides."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
    )


def encoded(value: object, path: str, tensors: dict[str, Any] | None) -> object:
    """Return a value as JSON, which ``decoded`` turns into an equal value of the same type.

    None, truth values, whole numbers, finite floats, texts and lists are JSON as they are. Any other value is an object
    with one key, the name of its type.

    Args:
        value: the value.
        path: its name. It begins the names of tensors, and errors.
        tensors: a dict to which the tensors in the value are added; None if there can be none.

    Raises:
        TypeError: the value, or one in it, has a type that a file cannot hold.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor) and tensors is not None and is_stored(value):
        while path in tensors:
            path += "'"
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, list) and kind is list:
        return [encoded(entry, f"{path}.{i}", tensors) for i, entry in enumerate(value)]
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            assert isinstance(value, tuple)
            return {name: [encoded(entry, f"{path}.{i}", tensors) for i, entry in enumerate(value)]}
    for name, mapping in MAPPINGS.items():
        if kind is mapping:
            assert isinstance(value, dict)
            pairs = value.items()
            return {name: [[encoded(k, path, None), encoded(v, f"{path}.{k}", tensors)] for k, v in pairs]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in SCALARS:
        return {"numpy": [value.dtype.name, encoded(value.item(), path, None)]}
    raise TypeError(
        f"{path}: expected a dense tensor, a number, a text, None, or a list, tuple or dict of these, received {kind.__name__}"
    )


def decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that ``encoded`` received. Its tensors are taken out of ``tensors``.

    Raises:
        ValueError: the JSON is not that of ``encoded``.
    """
    if isinstance(value, list):
        return [decoded(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    try:
        [(kind, content)] = value.items()
        if kind == "tensor":
            return tensors.pop(content)
        if kind == "float":
            return float(content)
        if kind == "numpy":
            name, number = content
            if name in SCALARS:
                return importlib.import_module("numpy").dtype(name).type(decoded(number, tensors))
        if kind in MAPPINGS:
            return MAPPINGS[kind]({decoded(k, tensors): decoded(v, tensors) for k, v in content})
        if kind == "list":  # only files of older versions have this key
            return decoded(content, tensors)
        if kind in SEQUENCES:
            return SEQUENCES[kind](decoded(content, tensors))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a value of a state, received another ({error!r})") from error
    raise ValueError(f"expected a value of a state, received one called {kind!r}")

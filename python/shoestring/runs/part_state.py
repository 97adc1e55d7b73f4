"""The state of a part of a training run, as tensors and JSON of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoestring.files.json_values import MAPPINGS, decoded, encoded
from shoestring.files.read_file import shown
from shoestring.optim.state_tensors import as_tensor

# Numbers and lists are tensors in a file, so that C++ can read them. The file names their kind in Python.
NUMBER, LIST, TUPLE = "number", "list", "tuple"
KINDS: dict[type, str] = {bool: NUMBER, int: NUMBER, float: NUMBER, list: LIST, tuple: TUPLE}


def split(state: Mapping[str, Any], where: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Return a part's state for a file: tensors, JSON, and the kinds of other values stored as tensors.

    Raises:
        ValueError: a file cannot hold the state.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{where}: expected a state dict with texts as keys, received {shown(state)}")
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    for key, value in state.items():
        tensor = None if isinstance(value, Tensor) or type(value) not in KINDS else as_tensor(value)
        if tensor is not None:
            tensors[key], kinds[key] = tensor, KINDS[type(value)]
    try:
        for key, value in state.items():
            if isinstance(value, Tensor):
                encoded(value, key, tensors)
        values = {k: encoded(v, k, tensors) for k, v in state.items() if k not in tensors}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a state that a file can hold, received {error}") from None
    return tensors, values, kinds


def joined(
    tensors: dict[str, Tensor], values: Mapping[str, Any], kinds: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return the state from which ``split`` made these tensors and values.

    Raises:
        ValueError: the file has something else.
    """
    try:
        state = {key: decoded(value, tensors) for key, value in values.items()}
        for key, kind in kinds.items():
            value = tensors.pop(key).tolist()
            state[key] = tuple(value) if kind == TUPLE else value
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected the state of a part, received another ({error})") from error
    return state | tensors


def joined_like(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], now: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return a part's state from a file of C++ or of version 1, which do not say what a value is in Python.

    A number is a number again if the part's present state has one there. A part that has just been made may lack
    entries. Those with dimensions remain tensors.
    """
    state = {key: _like(value, now.get(key), f"{where}: {key}") for key, value in values.items()}
    for key, tensor in tensors.items():
        is_tensor = isinstance(now[key], Tensor) if key in now else tensor.dim() > 0
        state[key] = tensor if is_tensor else tensor.tolist()
    return state


def _like(value: Any, now: Any, where: str) -> Any:
    """Return plain JSON with the types that the part's present state has: keys that are no texts, and tuples.

    Raises:
        ValueError: a key is not a text in the present state, and not among its keys.
    """
    if isinstance(value, list) and isinstance(now, (list, tuple)) and len(value) == len(now):
        entries = [_like(entry, present, where) for entry, present in zip(value, now, strict=True)]
        return type(now)(entries) if type(now) in (list, tuple) else entries
    if not isinstance(value, dict) or not isinstance(now, dict):
        return value
    keys = {_text(key): key for key in now}
    typed = {}
    for key, entry in value.items():
        if key not in keys and any(not isinstance(present, str) for present in now):
            raise ValueError(
                f"{where}: expected the keys {shown(list(now))}, received {shown(key)}: the file does not say its type. "
                "Set the part up as it was when the file was written"
            )
        present_key = keys.get(key, key)
        typed[present_key] = _like(entry, now.get(present_key), where)
    return type(now)(typed) if type(now) in MAPPINGS.values() else typed


def _text(key: object) -> object:
    """Return the text that JSON makes of a key, or a key that JSON cannot hold as it is."""
    return next(iter(json.loads(json.dumps({key: 0}, skipkeys=True))), key)

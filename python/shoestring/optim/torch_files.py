"""The state of optimizers of PyTorch, and of others with the same interface, as tensors and metadata."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.files.read_file import parse_json, shown
from shoestring.files.safetensors_file import Gathered
from shoestring.optim.files import like, plain
from shoestring.optim.sharded import as_dtensor, is_dtensor, piece_of
from shoestring.optim.sharded_state import gathered

FORMAT_VERSION = 1
# State of PyTorch's optimizers that has the shape of the parameter.
ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}


def name_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class in files; "torch." begins the names of PyTorch's."""
    kind = type(optimizer)
    module = "torch" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def store(optimizer: Optimizer, what: str) -> tuple[dict[str, Tensor | Gathered], dict[str, str]]:
    """Return the state of an optimizer, in the layout that ``shoestring.optim.files.store`` has.

    State that is no tensor is in the metadata, under the key ``values``. So is what a state dict has beside state and
    groups, such as the base optimizer of GaLore, under the key ``extra``.

    Raises:
        ValueError: the state holds something else than tensors, numbers, texts and None.
    """
    saved = optimizer.state_dict()
    name = name_of(optimizer)
    tensors: dict[str, Tensor | Gathered] = {}
    values: dict[str, Any] = {}
    groups = []
    for g, group in enumerate(saved["param_groups"]):
        options = {key: plain(value) for key, value in group.items() if key != "params"}
        groups.append({"size": len(group["params"]), "options": options})
        for i, number in enumerate(group["params"]):
            for key, value in saved["state"].get(number, {}).items():
                place = f"{g}.{i}.{key}"
                if is_dtensor(value):
                    tensors[place] = gathered(value)
                elif isinstance(value, Tensor):
                    if type(value) is not Tensor or value.layout != torch.strided:
                        raise ValueError(
                            f"{what}: {name}: {place}: expected a dense tensor, received another"
                        )
                    tensors[place] = value
                else:
                    values[place] = value
    more = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    extra = _encoded(more, "extra", tensors)
    try:
        texts = {"groups": json.dumps(groups), "values": json.dumps(values)}
        texts |= {"extra": json.dumps(extra)} if more else {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {name}: expected a state that JSON can hold, received {error}") from None
    return tensors, {"format_version": str(FORMAT_VERSION), "optimizer": name, **texts}


def restore(optimizer: Optimizer, tensors: dict[str, Tensor], metadata: dict[str, str], where: str) -> None:
    """Load what ``store`` has returned, or what C++ has saved for LibTorch's optimizer of the same name.

    Raises:
        ValueError: the state is that of another class or of other parameters. Nothing has changed then.
    """
    name = name_of(optimizer)
    for key, value in {"format_version": str(FORMAT_VERSION), "optimizer": name}.items():
        if metadata.get(key) != value:
            raise ValueError(f"{where}: expected {key} {value}, received {shown(metadata.get(key, 'none'))}")
    message = f"{where}: {name}: expected groups of this optimizer, received others"
    saved = parse_json(metadata.get("groups", "").encode(), message)
    ours = optimizer.param_groups
    sizes = [group.get("size") for group in saved] if isinstance(saved, list) else None
    if sizes != [len(group["params"]) for group in ours]:
        raise ValueError(message)
    state: dict[int, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    groups, first = [], 0
    for g, group in enumerate(ours):
        size = len(group["params"])
        options = {
            key: like(group.get(key), value, f"{where}: {key}") for key, value in saved[g]["options"].items()
        }
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append(own | options | {"params": list(range(first, first + size))})
        numbers |= {f"{g}.{i}": first + i for i in range(size)}
        first += size
    values = parse_json(metadata.get("values", "{}").encode(), message)
    more = _decoded(parse_json(metadata.get("extra", '{"dict": []}').encode(), message), tensors)
    for place, entry in {**values, **tensors}.items():
        if place.startswith("extra."):
            continue
        index, _, key = place.rpartition(".")
        if index not in numbers:
            raise ValueError(
                f"{where}: expected names <group>.<index>.<name> of the file's groups, received {shown(place)}"
            )
        state.setdefault(numbers[index], {})[key] = entry
    params = [p for group in ours for p in group["params"]]
    for number, entries in state.items():
        for key, entry in entries.items():
            shape = entry.shape if isinstance(entry, Tensor) else None
            if name.startswith("torch.") and key in ELEMENTWISE and shape not in (None, params[number].shape):
                raise ValueError(
                    f"{where}: {name}: {key}: expected shape {tuple(params[number].shape)}, "
                    f"received {tuple(shape)}"
                )
            if isinstance(entry, Tensor) and key in ELEMENTWISE and is_dtensor(params[number]):
                entries[key] = as_dtensor(piece_of(entry, params[number]), params[number], tuple(entry.shape))
    optimizer.load_state_dict({**more, "state": state, "param_groups": groups})


def _encoded(value: object, path: str, tensors: dict[str, Any]) -> object:
    """Return a nested value as JSON, in which the name of a tensor stands for the tensor."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        pairs = [[key, _encoded(entry, f"{path}.{key}", tensors)] for key, entry in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(entry, f"{path}.{i}", tensors) for i, entry in enumerate(value)]}
    return value


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what ``_encoded`` has got."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decoded(entry, tensors) for key, entry in content}
    return (tuple if kind == "tuple" else list)(_decoded(entry, tensors) for entry in content)

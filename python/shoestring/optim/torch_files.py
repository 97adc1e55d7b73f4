"""The state of optimizers of PyTorch, and of others with the same interface, as tensors and metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.core.dtensors import is_dtensor
from shoestring.files.json_values import decoded, encoded, is_stored
from shoestring.files.read_file import parse_json, shown
from shoestring.files.safetensors_file import Gathered
from shoestring.optim.files import extra_in, extra_of, like, plain
from shoestring.optim.parameter_names import GroupNames, names_text, orders_of, reordered
from shoestring.optim.sharded import as_dtensor, piece_of
from shoestring.optim.sharded_state import gathered

FORMAT_VERSION = 1
# State of PyTorch's optimizers that has the shape of the parameter.
ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}


def name_of(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's class in files; "torch." begins the names of PyTorch's."""
    kind = type(optimizer)
    module = "torch" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def store(
    optimizer: Optimizer, what: str, names: Sequence[GroupNames]
) -> tuple[dict[str, Tensor | Gathered], dict[str, str]]:
    """Return the state of an optimizer, in the layout that ``shoestring.optim.files.store`` has.

    State that is no tensor is in the metadata, under the key ``state``. So is what a state dict has beside state and
    groups, such as the base optimizer of GaLore, under the key ``extra``. Both are encoded by
    ``shoestring.files.json_values``.

    Raises:
        ValueError: the state holds something that a file cannot hold.
    """
    saved = optimizer.state_dict()
    name = name_of(optimizer)
    tensors: dict[str, Tensor | Gathered] = {}
    others: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for g, group in enumerate(saved["param_groups"]):
        options = {key: plain(value) for key, value in group.items() if key in optimizer.defaults}
        groups.append({"size": len(group["params"]), "options": options})
        for i, number in enumerate(group["params"]):
            for key, value in saved["state"].get(number, {}).items():
                path = f"{g}.{i}.{key}"
                if not isinstance(key, str):
                    raise ValueError(f"{what}: {name}: {g}.{i}: expected state by names, received {key!r}")
                if is_dtensor(value):
                    tensors[path] = gathered(value)
                elif isinstance(value, Tensor):
                    if not is_stored(value):
                        raise ValueError(f"{what}: {name}: {path}: expected a dense tensor, received another")
                    tensors[path] = value
                else:
                    others[path] = value
    more = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    try:
        values = {path: encoded(value, path, tensors) for path, value in others.items()}
        extra = encoded(more, "extra", tensors)
        for described, group in zip(groups, saved["param_groups"], strict=True):
            _check_options(described["options"])
            described["extra"] = extra_of(group, optimizer.defaults)
        texts = {"groups": json.dumps(groups), "state": json.dumps(values)}
        texts |= {"extra": json.dumps(extra)} if more else {}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: {name}: expected a state that a file can hold, received {error}") from None
    metadata = {"format_version": str(FORMAT_VERSION), "optimizer": name, **texts, **names_text(names)}
    return tensors, metadata


def _check_options(options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if JSON would change an option."""
    for key, value in options.items():
        again = like(value, json.loads(json.dumps(value)), key)
        if type(again) is not type(value) or again != value:
            raise TypeError(f"{key}: {value!r}, which JSON would change")


def restore(
    optimizer: Optimizer,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    where: str,
    names: Sequence[GroupNames],
) -> None:
    """Load what ``store`` has returned, or what C++ has saved for LibTorch's optimizer of the same name.

    ``names`` are those of the parameters. The state of each is found by its name, if the file has names.

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
        options = extra_in(saved[g].get("extra", {}), group, where)
        options |= {
            key: like(group.get(key), value, f"{where}: {key}")
            for key, value in saved[g]["options"].items()
            if key != "param_names"
        }
        current = {key: value for key, value in group.items() if key != "params"}
        groups.append(current | options | {"params": list(range(first, first + size))})
        numbers |= {f"{g}.{i}": first + i for i in range(size)}
        first += size
    tensors = dict(tensors)
    values = parse_json(metadata.get("values", "{}").encode(), message)  # a key of files of older versions
    if "state" in metadata:
        encoded_state = parse_json(metadata["state"].encode(), message)
        values = {path: decoded(value, tensors) for path, value in encoded_state.items()}
    more = decoded(parse_json(metadata.get("extra", '{"dict": []}').encode(), message), tensors)
    orders = orders_of(names, metadata, [group["options"] for group in saved], where)
    if isinstance(optimizer, torch.optim.LBFGS) and orders != [sorted(order) for order in orders]:
        raise ValueError(
            f"{where}: {name}: expected the parameters in the order of the file, because its state is of all of them "
            "together, received another order"
        )
    for path, entry in reordered({**values, **tensors}, orders).items():
        index, key = ".".join(path.split(".", 2)[:2]), (*path.split(".", 2), "", "")[2]
        if index not in numbers:
            raise ValueError(
                f"{where}: expected names <group>.<index>.<name> of the file's groups, received {shown(path)}"
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
    load_exactly(optimizer, {**more, "state": state, "param_groups": groups})


def load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict so that each tensor keeps its dtype.

    ``torch.optim.Optimizer.load_state_dict`` converts state to the dtype of the parameter. This would round fp32 moments
    of bf16 weights.
    """
    optimizer.load_state_dict(state_dict)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=True):
        entry = optimizer.state.get(p, {})
        for key, value in state_dict["state"].get(number, {}).items():
            now = entry.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                entry[key] = value.to(now.device, copy=True)

"""Saving and loading optimizer state as a safetensors file, in the same format as the C++ library."""

import json
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.core.dtensors import is_dtensor
from shoestring.files.json_values import decoded, encoded
from shoestring.files.read_file import is_integer, is_number, parse_json, shown
from shoestring.files.safetensors_file import Gathered, open_safetensors, save_gathered
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.parameter_names import GroupNames, names_of, names_text, orders_of, reordered
from shoestring.optim.sharded_state import gathered_entries
from shoestring.optim.state_dicts import FORMAT_VERSION

# The value of the key "format" in the safetensors metadata of an optimizer's file. Tensors are named
# "<group>.<index in the group>.<name>". The other metadata keys are format_version, optimizer (the class) and
# groups. The value of groups is a JSON list of {"size": number of parameters, "options": {...}, "extra":
# values that schedulers keep in the group, as files/json_values.py encodes them}. If parameters have names, the key
# names has a JSON list with the names of each group.
FORMAT = "shoestring.optimizer"


def save_optimizer(optimizer: LowMemoryOptimizer, path: str | os.PathLike[str]) -> None:
    """Write the state and the group options of an optimizer to the safetensors file ``path``.

    An existing file is replaced once the new one is complete and on disk. A learning rate that is a tensor is
    written as a number. State is written directly from its storage, also from the file of
    ``offload="nvme:DIR"``, so saving takes no extra memory.

    If processes have split the state (``shoestring.distributed.shard``), all of them must call this function.
    Each gathers one whole tensor at a time, and the first writes them. Any number of processes can load the
    file; each reads its part.

    Args:
        optimizer: an optimizer of ``shoestring.optim``.
        path: the file to write.

    Raises:
        ValueError: safetensors cannot hold the state. Either a group has an option that is not a number, a
            string or a list of these, or a parameter is a DTensor. For DTensors use
            ``torch.distributed.checkpoint``.
        OSError: the file cannot be written. An existing file is unchanged then.

    Example:
        >>> import os
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> shoestring.optim.save_optimizer(optimizer, "optimizer.safetensors")
        >>> os.path.exists("optimizer.safetensors")
        True
    """
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if is_dtensor(p):
                raise ValueError(
                    f"save_optimizer: group {g}, parameter {i}: expected a whole tensor, received a DTensor; use "
                    "save_training, or torch.distributed.checkpoint"
                )
    tensors, metadata = store(optimizer, "save_optimizer", names_of(optimizer))
    save_gathered(path, tensors, {"format": FORMAT, **metadata}, writes=optimizer._core.writes())


def store(
    optimizer: LowMemoryOptimizer, what: str, names: Sequence[GroupNames]
) -> tuple[dict[str, Tensor | Gathered], dict[str, str]]:
    """Return the state of an optimizer as tensors and metadata of a safetensors file. ``what`` begins errors.

    ``names`` are those of its parameters, as ``names_of`` returns them.
    """
    groups = []
    tensors: dict[str, Tensor | Gathered] = {}
    is_split = optimizer._all_ranks is not None
    if is_split:
        tensors |= optimizer._split_state(what)
    for g, group in enumerate(optimizer.param_groups):
        options = {name: plain(group[name]) for name in optimizer.defaults}
        try:
            extra = extra_of(group, optimizer.defaults)
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            message = f"{what}: group {g}: expected options that JSON can hold, received {error}"
            raise ValueError(message) from None
        groups.append({"size": len(group["params"]), "options": options, "extra": extra})
        for i, p in enumerate(group["params"]):
            entries: dict[str, Any] = {} if is_split else optimizer.state.get(p, {})
            if entries and is_dtensor(p):
                entries = gathered_entries(optimizer, p, group)
            tensors |= {f"{g}.{i}.{name}": value for name, value in entries.items()}
    if optimizer.step_in_backward and optimizer.grad_norm is not None:
        tensors["grad_norm"] = optimizer.grad_norm
    metadata = {"format_version": str(FORMAT_VERSION), "optimizer": optimizer._core_class}
    return tensors, {**metadata, "groups": json.dumps(groups), **names_text(names)}


def load_optimizer(optimizer: LowMemoryOptimizer, path: str | os.PathLike[str]) -> None:
    """Load the state and the group options from a file that ``save_optimizer`` wrote, in Python or in C++.

    The optimizer must have the class and the parameters of the saved one, in the same groups and order.
    Training then continues bit for bit. If the parameters have names, here and in the file
    (``AdamW(model.named_parameters())``), their order within a group does not matter.

    Args:
        optimizer: the optimizer to load into.
        path: the file to read.

    Raises:
        ValueError: the file is damaged, or does not fit the optimizer. Nothing has changed then.
        OSError: the file cannot be read.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> shoestring.optim.save_optimizer(optimizer, "optimizer.safetensors")
        >>> resumed = shoestring.optim.AdamW(model.parameters(), lr=0.1)
        >>> shoestring.optim.load_optimizer(resumed, "optimizer.safetensors")
        >>> resumed.param_groups[0]["lr"]
        0.001
    """
    where = f"{type(optimizer).__name__}: load_optimizer: {os.fspath(path)}"
    file = open_safetensors(path, f"{where}: expected a safetensors file, received a damaged one")
    metadata = file.metadata()
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{where}: expected format {FORMAT}, received {_brief(metadata.get('format', 'none'))}"
        )
    restore(optimizer, load_all(file, "", optimizer), metadata, where, names_of(optimizer))


def load_all(file: Any, prefix: str, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file whose names begin with ``prefix``, by the rest of their names.

    If processes have split the state of the optimizer, the tensors map the file, since this process needs its parts
    alone, which the optimizer copies.
    """
    is_split = isinstance(optimizer, LowMemoryOptimizer) and optimizer._core.is_split()
    load = file.map if is_split else file.load
    return {name[len(prefix) :]: load(name) for name in file.tensors() if name.startswith(prefix)}


def restore(
    optimizer: LowMemoryOptimizer,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    where: str,
    names: Sequence[GroupNames],
) -> None:
    """Load what ``store`` has returned, in Python or in C++, for parameters of these names. ``where`` begins errors."""
    expected = {"format_version": str(FORMAT_VERSION), "optimizer": optimizer._core_class}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise ValueError(f"{where}: expected {key} {value}, received {_brief(metadata.get(key, 'none'))}")
    tensors = dict(tensors)
    norm = tensors.pop("grad_norm", None)
    saved, groups, first = _groups(metadata, optimizer, where), [], 0
    # The position of each parameter in the optimizer. The keys are (group, index in the group).
    numbers: dict[tuple[str, str], int] = {}
    for g, (ours, theirs) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        size = len(ours["params"])
        if theirs["size"] != size:
            raise ValueError(f"{where}: expected {size} parameters in group {g}, received {theirs['size']}")
        current = {name: value for name, value in ours.items() if name != "params"}
        loaded = extra_in(theirs.get("extra", {}), ours, where)
        loaded |= {
            name: like(ours.get(name), value, f"{where}: {name}") for name, value in theirs["options"].items()
        }
        try:
            optimizer._check_options(current | loaded)
        # An option is None in the optimizer and of another type than its values in the file.
        except TypeError as error:
            raise ValueError(
                f"{where}: group {g}: expected options of this optimizer's types, received others: {error}"
            ) from None
        groups.append(current | loaded | {"params": list(range(first, first + size))})
        numbers |= {(str(g), str(i)): first + i for i in range(size)}
        first += size
    extras = [group.get("extra", {}) for group in saved]
    tensors = reordered(tensors, orders_of(names, metadata, extras, where))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, index, entry = (*name.split(".", 2), "", "")[:3]
        if (group, index) not in numbers:
            raise ValueError(
                f"{where}: expected tensors <group>.<index>.<name>, of the file's groups, received {shown(name)}"
            )
        state.setdefault(numbers[group, index], {})[entry] = tensor
    optimizer.load_state_dict(
        {"state": state, "param_groups": groups, "format_version": FORMAT_VERSION}
        | ({} if norm is None else {"grad_norm": norm})
    )


def _groups(metadata: dict[str, str], optimizer: LowMemoryOptimizer, where: str) -> list[dict[str, Any]]:
    message = f"{where}: expected groups with the options {sorted(optimizer.defaults)}, received others"
    groups = parse_json(metadata.get("groups", "").encode(), message)
    fits = isinstance(groups, list) and all(
        isinstance(group, dict)
        and is_integer(group.get("size"))
        and isinstance(group.get("options"), dict)
        and group["options"].keys() == optimizer.defaults.keys()
        and isinstance(group.get("extra", {}), dict)
        for group in groups
    )
    if not fits:
        raise ValueError(message)
    if len(groups) != len(optimizer.param_groups):
        count = len(optimizer.param_groups)
        raise ValueError(f"{where}: expected {count} groups of parameters, received {len(groups)}")
    result: list[dict[str, Any]] = groups
    return result


def extra_of(group: Mapping[str, Any], options: Container[str]) -> dict[str, object]:
    """Return the values of a group that are no options, such as those that schedulers keep there, for JSON.

    Raises:
        TypeError: JSON cannot hold one of them.
    """
    apart = ("params", "param_names")  # the names are in the key "names" of the metadata
    return {
        name: encoded(plain(value), name, None)
        for name, value in group.items()
        if name not in apart and name not in options
    }


def extra_in(values: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Decode values that ``extra_of`` returned, and convert them to the types in ``group``."""
    extra = {}
    for name, value in values.items():
        if name == "param_names":
            continue
        with suppress(ValueError):  # files of older versions hold dicts that are not encoded
            value = decoded(value, {})
        ours = group.get(name)
        as_is = ours is None or (isinstance(ours, str) and isinstance(value, str))
        extra[name] = value if as_is else like(ours, value, f"{where}: {name}")
    return extra


def plain(value: object) -> object:
    """Return a tensor of one number as a number, and everything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def like(ours: object, value: Any, where: str) -> object:
    """Convert an option's JSON value to the type that the option has in the optimizer's group.

    A JSON list becomes a tuple if the option is a tuple. A learning rate stays a tensor.
    """
    several = isinstance(ours, (tuple, list))
    if isinstance(value, (tuple, list)) != several and ours is not None:
        raise ValueError(
            f"{where}: expected {'several values' if several else 'one value'}, received {shown(value)}"
        )
    if isinstance(ours, tuple):
        if len(value) != len(ours):
            raise ValueError(f"{where}: expected {len(ours)} values, received {shown(value)}")
        return tuple(like(one, other, where) for one, other in zip(ours, value, strict=True))
    if isinstance(value, (tuple, list, dict)) or value is None:
        return value
    kind: type | tuple[type, ...] = (
        bool if isinstance(ours, bool) else str if isinstance(ours, str) else (int, float)
    )
    plain = isinstance(value, bool) or is_number(value) or (isinstance(value, str) and len(value) <= 64)
    if not plain or (
        ours is not None
        and (not isinstance(value, kind) or isinstance(value, bool) != isinstance(ours, bool))
    ):
        raise ValueError(f"{where}: expected a value as {shown(ours)}, received {shown(value)}")
    return torch.full_like(ours, float(value)) if isinstance(ours, Tensor) else value


def _brief(text: str) -> str:
    return text if len(text) <= 64 else shown(text)

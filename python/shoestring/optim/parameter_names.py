"""The names of an optimizer's parameters, by which saved state finds its parameter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from shoestring.files.read_file import parse_json, shown

# The names of a group's parameters; None for a parameter without a name.
GroupNames = Sequence[str | None]
# Prefixes that wrapping modules add to the names of a model's parameters.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

T = TypeVar("T")


def names_of(optimizer: Optimizer, known: Mapping[Tensor, str] | None = None) -> list[list[str | None]]:
    """Return the names of the parameters of each group: those in ``known``, else those that the optimizer got."""
    names = []
    for group in optimizer.param_groups:
        params = group["params"]
        group_names = group.get("param_names") or [None] * len(params)
        names.append([(known or {}).get(p, name) for p, name in zip(params, group_names, strict=True)])
    return names


def unwrapped(name: str) -> str:
    """Return the name of a parameter without those of modules that wrap the model."""
    while any(name.startswith(wrapper) for wrapper in WRAPPERS):
        name = name.partition(".")[2]
    return name


def order_of(ours: GroupNames, saved: GroupNames, where: str) -> list[int]:
    """Return, for each parameter of a group, its position in the saved group.

    Names that both sides have are the same parameter. Parameters of which one side has no name follow in their order.

    Raises:
        ValueError: both sides have names that differ.
    """
    if list(ours) == list(saved):
        return list(range(len(saved)))
    positions = {name: i for i, name in enumerate(saved) if name is not None}
    for names in (ours, saved):
        twice = [name for name, count in Counter(names).items() if count > 1 and name is not None]
        if twice:
            raise ValueError(f"{where}: expected each name once, received {shown(twice[0])} twice")
    if not all(name is None or name in positions for name in ours):
        plain = {unwrapped(name): i for name, i in positions.items()}
        if len(plain) == len(positions):
            positions, ours = plain, [None if name is None else unwrapped(name) for name in ours]
    order = [positions.get(name) if name is not None else None for name in ours]
    left = iter([i for i in range(len(saved)) if i not in set(order)])
    for i, position in enumerate(order):
        if position is not None:
            continue
        order[i] = other = next(left)
        if ours[i] is not None and saved[other] is not None:
            raise ValueError(
                f"{where}: expected a state of the parameter {shown(ours[i])}, received one of {shown(saved[other])} in its "
                "place. Give the groups the parameters that they had, or remove the names from the state"
            )
    return [position for position in order if position is not None]


def names_text(names: Sequence[GroupNames]) -> dict[str, str]:
    """Return the entry of a file's metadata that holds the names; nothing if no parameter has a name."""
    is_any = any(name is not None for group in names for name in group)
    return {"names": json.dumps(names)} if is_any else {}


def orders_of(
    ours: Sequence[GroupNames], metadata: Mapping[str, str], groups: Sequence[Mapping[str, Any]], where: str
) -> list[list[int]]:
    """Return ``order_of`` of each group of a file with the groups ``groups``.

    Raises:
        ValueError: both sides have names that differ, or the file has names that do not fit its groups.
    """
    message = f"{where}: expected the names of the parameters of each group, received others"
    if "names" in metadata:
        saved = parse_json(metadata["names"].encode(), message)
    else:  # files of older versions have the names among the values of a group
        saved = [
            group.get("param_names") or [None] * len(names) for group, names in zip(groups, ours, strict=True)
        ]
    good = isinstance(saved, list) and len(saved) == len(ours) and all(map(_fits, saved, ours))
    if not good:
        raise ValueError(message)
    return [
        order_of(names, theirs, f"{where}: group {g}")
        for g, (names, theirs) in enumerate(zip(ours, saved, strict=True))
    ]


def _fits(names: object, like: GroupNames) -> bool:
    is_list = isinstance(names, list) and len(names) == len(like)
    return is_list and all(name is None or isinstance(name, str) for name in names)  # type: ignore[attr-defined]


def reordered(tensors: Mapping[str, T], orders: Sequence[Sequence[int]]) -> dict[str, T]:
    """Return entries called ``<group>.<index>.<name>`` with the indices of this optimizer's parameters."""
    prefixes = {
        f"{g}.{theirs}": f"{g}.{ours}" for g, order in enumerate(orders) for ours, theirs in enumerate(order)
    }
    renamed = {}
    for name, tensor in tensors.items():
        group, index, entry = (*name.split(".", 2), "", "")[:3]
        prefix = prefixes.get(f"{group}.{index}")
        renamed[name if prefix is None else f"{prefix}.{entry}"] = tensor
    return renamed


def by_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose parameters are in the order of this optimizer, if both have names.

    A state dict whose parameters are named in place of numbered, as by ``torch.distributed.checkpoint``, is in the order
    of these names.

    Raises:
        ValueError: a group has other names.
    """
    groups = []
    where = f"{type(optimizer).__name__}: load_state_dict"
    for g, theirs in enumerate(state_dict["param_groups"]):
        ours = optimizer.param_groups[g].get("param_names") if g < len(optimizer.param_groups) else None
        saved = theirs.get("param_names")
        if ours is None or saved is None or len(ours) != len(theirs["params"]):
            groups.append(theirs)
            continue
        if not _fits(saved, ours):
            raise ValueError(
                f"{where}: group {g}: expected a name of each parameter, received {shown(saved)}"
            )
        if not any(isinstance(key, str) for key in theirs["params"]):
            order = order_of(ours, saved, f"{where}: group {g}")
            theirs = {**theirs, "params": [theirs["params"][i] for i in order]}
        groups.append({**theirs, "param_names": list(ours)})
    return {**state_dict, "param_groups": groups}

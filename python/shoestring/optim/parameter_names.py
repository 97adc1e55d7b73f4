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
# Modules that wrap a model begin its names so.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

T = TypeVar("T")


def names_of(optimizer: Optimizer, known: Mapping[Tensor, str] | None = None) -> list[list[str | None]]:
    """Return the names of the parameters of each group: those in ``known``, else those that the optimizer got."""
    found = []
    for group in optimizer.param_groups:
        params = group["params"]
        own = group.get("param_names") or [None] * len(params)
        found.append([(known or {}).get(p, name) for p, name in zip(params, own, strict=True)])
    return found


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
    places = {name: i for i, name in enumerate(saved) if name is not None}
    for names in (ours, saved):
        twice = [name for name, count in Counter(names).items() if count > 1 and name is not None]
        if twice:
            raise ValueError(f"{where}: expected each name once, received {shown(twice[0])} twice")
    if not all(name is None or name in places for name in ours):
        plain = {unwrapped(name): i for name, i in places.items()}
        if len(plain) == len(places):
            places, ours = plain, [None if name is None else unwrapped(name) for name in ours]
    order = [places.get(name) if name is not None else None for name in ours]
    left = iter([i for i in range(len(saved)) if i not in set(order)])
    for i, place in enumerate(order):
        if place is not None:
            continue
        order[i] = other = next(left)
        if ours[i] is not None and saved[other] is not None:
            raise ValueError(
                f"{where}: expected a state of the parameter {shown(ours[i])}, received one of {shown(saved[other])} in its "
                "place. Give the groups the parameters that they had, or remove the names from the state"
            )
    return [place for place in order if place is not None]


def names_text(names: Sequence[GroupNames]) -> dict[str, str]:
    """Return the entry of a file's metadata that holds the names; nothing if no parameter has a name."""
    is_any = any(name is not None for group in names for name in group)
    return {"names": json.dumps(names)} if is_any else {}


def orders_of(
    ours: Sequence[GroupNames],
    metadata: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    where: str,
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
            group.get("param_names") or [None] * len(own) for group, own in zip(groups, ours, strict=True)
        ]
    good = isinstance(saved, list) and len(saved) == len(ours) and all(map(_fits, saved, ours))
    if not good:
        raise ValueError(message)
    return [
        order_of(own, theirs, f"{where}: group {g}")
        for g, (own, theirs) in enumerate(zip(ours, saved, strict=True))
    ]


def _fits(names: object, like: GroupNames) -> bool:
    is_list = isinstance(names, list) and len(names) == len(like)
    return is_list and all(name is None or isinstance(name, str) for name in names)  # type: ignore[attr-defined]


def reordered(tensors: Mapping[str, T], orders: Sequence[Sequence[int]]) -> dict[str, T]:
    """Return entries called ``<group>.<index>.<name>`` with the indices of this optimizer's parameters."""
    places = {
        f"{g}.{theirs}": f"{g}.{ours}" for g, order in enumerate(orders) for ours, theirs in enumerate(order)
    }
    found = {}
    for name, tensor in tensors.items():
        group, index, entry = (*name.split(".", 2), "", "")[:3]
        place = places.get(f"{group}.{index}")
        found[name if place is None else f"{place}.{entry}"] = tensor
    return found


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
        own = optimizer.param_groups[g].get("param_names") if g < len(optimizer.param_groups) else None
        saved = theirs.get("param_names")
        if own is None or saved is None or len(own) != len(theirs["params"]):
            groups.append(theirs)
            continue
        if not _fits(saved, own):
            raise ValueError(
                f"{where}: group {g}: expected a name of each parameter, received {shown(saved)}"
            )
        if not any(isinstance(key, str) for key in theirs["params"]):
            order = order_of(own, saved, f"{where}: group {g}")
            theirs = {**theirs, "params": [theirs["params"][i] for i in order]}
        groups.append({**theirs, "param_names": list(own)})
    return {**state_dict, "param_groups": groups}

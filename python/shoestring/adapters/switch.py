"""Which of a model's adapters are in use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shoestring.adapters.adapted import AdaptedLayer, Rows, adapted_layers
from shoestring.adapters.trained_copy import TrainedCopy, unwrap
from shoestring.adapters.virtual_tokens import VirtualTokens, detach_tokens

Member = AdaptedLayer | TrainedCopy | VirtualTokens


def members(model: nn.Module) -> dict[str, Member]:
    """Every module that has adapters, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Member)}


def adapter_names(model: nn.Module) -> list[str]:
    """The names of the model's adapters, in the order in which its modules name them."""
    return list(dict.fromkeys(name for member in members(model).values() for name in member.adapters))


def check_known(function: str, model: nn.Module, names: Sequence[str]) -> list[str]:
    """``names`` as a list.

    Raises:
        ValueError: a name that no adapter has.
    """
    known = adapter_names(model)
    for name in names:
        if name not in known:
            raise ValueError(
                f"lora.{function}: adapter_names: expected names of this model's adapters, {', '.join(known) or 'none'}; "
                f"received {name!r}"
            )
    return list(names)


def set_adapter(model: nn.Module, adapter_names: str | Sequence[str]) -> None:
    """Uses the named adapter, or the sum of several, from now on; they alone require gradients.

    Raises:
        ValueError: a name that no adapter has, or two adapters with a trained copy of the same module, or virtual tokens.
    """
    names = check_known(
        "set_adapter", model, [adapter_names] if isinstance(adapter_names, str) else adapter_names
    )
    found = members(model)
    for place, member in found.items():
        copies = [name for name in names if name in member.adapters]
        if not isinstance(member, AdaptedLayer) and len(copies) > 1:
            what = f"a trained copy of {place}" if isinstance(member, TrainedCopy) else "virtual tokens"
            raise ValueError(
                f"lora.set_adapter: adapter_names: expected one with {what}, received {', '.join(copies)}"
            )
    biases = "none"
    for member in found.values():
        member.active = tuple(names)
        for name, options in member.adapters.items():
            for parameter in member.tensors(name).values():
                parameter.requires_grad_(name in names)
            biases = options.bias if name in names and options.bias != "none" else biases
    trained = base_biases(model, biases)
    for name, parameter in base_biases(model, "all").items():
        parameter.requires_grad_(name in trained)


def base_biases(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """The base's own biases by name, PEFT's rule: "all"; "lora_only" and "vera_only" those of layers with adapters."""
    if which == "none":
        return {}
    adapted = adapted_layers(model)
    inside = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, (TrainedCopy, VirtualTokens)))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if (name == "bias" or name.endswith(".bias"))
        and not name.startswith(inside)
        and (which == "all" or name.removesuffix("bias").rstrip(".") in adapted)
    }


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Within it the model is its base alone. Biases that were trained with it (``bias``) stay as trained."""
    found = list(members(model).values())
    former = [member.enabled for member in found]
    for member in found:
        member.enabled = False
    try:
        yield
    finally:
        for member, enabled in zip(found, former, strict=True):
            member.enabled = enabled


@contextmanager
def adapters_per_row(model: nn.Module, adapter_names: Sequence[str | None]) -> Iterator[None]:
    """Within it each row of the batch has an adapter of its own; None is the base alone.

    In every layer that is one product with the adapters concatenated, in which a row's share of the others is zero.

    Raises:
        ValueError: a name that no adapter has, or IA3 adapters, expert adapters or trained copies among them; from the
            forward pass a batch of another length.
    """
    chosen = [name for name in dict.fromkeys(adapter_names) if name is not None]
    check_known("adapters_per_row", model, chosen)
    found = members(model)
    for place, member in found.items():
        here = [name for name in chosen if name in member.adapters]
        if here and not getattr(member, "CAN_MIX_ROWS", False):
            raise ValueError(
                f"lora.adapters_per_row: adapter_names: expected adapters that only add to layers, received {here[0]!r}, "
                f"which has a {type(member).__name__} at {place}"
            )
    for member in found.values():
        if isinstance(member, AdaptedLayer):
            own = tuple(name for name in chosen if name in member.adapters)
            uses = [[float(row == name) for name in own] for row in adapter_names]
            member.rows = Rows(own, torch.tensor(uses, device=member.base_weight().device))
    try:
        yield
    finally:
        for member in found.values():
            member.rows = None


def delete_adapter(model: nn.Module, adapter_name: str) -> None:
    """Takes an adapter off the model, and its part back into the base where its initialisation took that out.

    The others stay in use; where it was the only one in use the model is its base, until :func:`set_adapter`.

    Raises:
        ValueError: a name that no adapter has.
    """
    check_known("delete_adapter", model, [adapter_name])
    for place, member in members(model).items():
        member.active = tuple(name for name in member.active if name != adapter_name)
        if adapter_name in member.adapters:
            member.remove(adapter_name)
            if isinstance(member, TrainedCopy) and not member.adapters:
                unwrap(model, place)
            if isinstance(member, VirtualTokens) and not member.adapters:
                detach_tokens(model)

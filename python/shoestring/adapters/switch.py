"""Select which adapters of a model are active."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shoestring.adapters.adapted import AdaptedLayer, Rows, adapted_layers
from shoestring.adapters.trained_copy import TrainedCopy, unwrap
from shoestring.adapters.virtual_tokens import VirtualTokens, detach_tokens
from shoestring.core.fast_paths import set_fast_paths

Member = AdaptedLayer | TrainedCopy | VirtualTokens


def members(model: nn.Module) -> dict[str, Member]:
    """Return every module with adapters, by name: adapted layers, trained copies and virtual tokens."""
    return {n: m for n, m in model.named_modules() if isinstance(m, Member)}


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the model's adapters, in the order of the modules that have them.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), adapter_name="first")
        >>> model = shoestring.lora.apply(model, adapter_name="second")
        >>> shoestring.lora.adapter_names(model)
        ['first', 'second']
    """
    return list(dict.fromkeys(name for member in members(model).values() for name in member.adapters))


def check_known(function: str, model: nn.Module, names: Sequence[str]) -> list[str]:
    """Check that the model has adapters of all these names, and return the names as a list.

    Raises:
        ValueError: no adapter has one of the names.
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
    """Activate an adapter, or the sum of several; only active adapters require gradients.

    Call backward before: an adapter that is no longer active gets no gradients of an earlier forward.

    Args:
        model: a model with adapters.
        adapter_names: the name of an adapter, or a list of names. With an empty list, the model runs without
            adapters.

    Raises:
        ValueError: no adapter has one of the names, or two of the adapters have a trained copy of the same
            module or virtual tokens.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), adapter_name="first")
        >>> model = shoestring.lora.apply(model, adapter_name="second")
        >>> shoestring.lora.set_adapter(model, ["first", "second"])
        >>> model[0].lora_A["first"].requires_grad
        True
    """
    names = check_known(
        "set_adapter", model, [adapter_names] if isinstance(adapter_names, str) else adapter_names
    )
    holders = members(model)
    for module_name, member in holders.items():
        copies = [name for name in names if name in member.adapters]
        if len(copies) > 1 and not getattr(member, "CAN_ADD", False):
            what = "virtual tokens"
            if isinstance(member, TrainedCopy):
                what = f"a trained copy (modules_to_save) of {module_name}"
            elif isinstance(member, AdaptedLayer):
                what = f"trained tokens (trainable_token_indices) of {module_name}"
            raise ValueError(
                f"lora.set_adapter: adapter_names: expected at most one adapter with {what}, received "
                f"{', '.join(copies)}"
            )
    biases = "none"
    for member in holders.values():
        member.active = tuple(names)
        for name, options in member.adapters.items():
            for parameter in member.tensors(name).values():
                parameter.requires_grad_(name in names)
            biases = options.bias if name in names and options.bias != "none" else biases
    trained = base_biases(model, biases)
    for name, parameter in base_biases(model, "all").items():
        parameter.requires_grad_(name in trained)
    set_fast_paths(model)


def base_biases(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """Return the biases of the model that PEFT's option ``bias`` trains with an adapter, by name.

    ``which`` is the value of this option. "none": no biases. "all": all biases. "lora_only" and "vera_only":
    the biases of layers with adapters.
    """
    if which == "none":
        return {}
    adapted = {name for name, layer in adapted_layers(model).items() if layer.CAN_ADD}
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
    """Disable all adapters inside the ``with`` block.

    Biases of the model that were trained with an adapter (option ``bias``) keep their trained values.

    Example:
        >>> base, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> expected = base(x)
        >>> model = shoestring.lora.apply(torch.nn.Sequential(base), rank=2)
        >>> with shoestring.lora.disable_adapter(model):
        ...     y = model(x)
        >>> torch.equal(y, expected)
        True
    """
    holders = list(members(model).values())
    former = [member.enabled for member in holders]
    for member in holders:
        member.enabled = False
    try:
        yield
    finally:
        for member, enabled in zip(holders, former, strict=True):
            member.enabled = enabled


@contextmanager
def adapters_per_row(model: nn.Module, adapter_names: Sequence[str | None]) -> Iterator[None]:
    """Use a different adapter for each row of the batch inside the ``with`` block.

    Every layer computes one product with the concatenated adapters. For each row of the batch, the results of
    the adapters that the row does not use are multiplied by zero.

    Args:
        model: a model with adapters.
        adapter_names: one adapter name for each row of the batch; None is the model without an adapter.

    Raises:
        ValueError: no adapter has one of the names; or an adapter is of the type IA3, or has experts, trained
            copies or virtual tokens. Forward raises a ValueError if the number of batch rows is not the
            number of names.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), adapter_name="first")
        >>> model = shoestring.lora.apply(model, adapter_name="second")
        >>> with shoestring.lora.adapters_per_row(model, ["first", "second", None]):
        ...     y = model(torch.randn(3, 8))
        >>> y.shape
        torch.Size([3, 4])
    """
    chosen = [name for name in dict.fromkeys(adapter_names) if name is not None]
    check_known("adapters_per_row", model, chosen)
    holders = members(model)
    for module_name, member in holders.items():
        member_adapters = [name for name in chosen if name in member.adapters]
        if member_adapters and not getattr(member, "CAN_MIX_ROWS", False):
            raise ValueError(
                f"lora.adapters_per_row: adapter_names: expected adapters that only add to layers, received {member_adapters[0]!r}, "
                f"which has a {type(member).__name__} at {module_name}"
            )
    for member in holders.values():
        if isinstance(member, AdaptedLayer):
            names = tuple(name for name in chosen if name in member.adapters)
            uses = [[float(row == name) for name in names] for row in adapter_names]
            member.rows = Rows(names, torch.tensor(uses, device=member.base_weight().device))
    try:
        yield
    finally:
        for member in holders.values():
            member.rows = None


def delete_adapter(model: nn.Module, adapter_name: str) -> None:
    """Remove an adapter from the model.

    If the initialisation of the adapter changed the base weights, they get their original values back. Other
    active adapters stay active. If no adapter is active any more, the model runs without adapters until
    :func:`set_adapter` is called.

    Raises:
        ValueError: no adapter has this name.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), adapter_name="first")
        >>> model = shoestring.lora.apply(model, adapter_name="second")
        >>> shoestring.lora.delete_adapter(model, "first")
        >>> shoestring.lora.adapter_names(model)
        ['second']
    """
    check_known("delete_adapter", model, [adapter_name])
    for module_name, member in members(model).items():
        member.active = tuple(name for name in member.active if name != adapter_name)
        if adapter_name in member.adapters:
            member.remove(adapter_name)
            if isinstance(member, TrainedCopy) and not member.adapters:
                unwrap(model, module_name)
            if isinstance(member, VirtualTokens) and not member.adapters:
                detach_tokens(model)
    set_fast_paths(model)

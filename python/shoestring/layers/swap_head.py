"""Replace the output layer of a model for another number of classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from shoestring.core.name_patterns import candidates

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@torch.no_grad()
def swap_head(
    model: nn.Module,
    head: str | nn.Module,
    classes: int,
    *,
    keep: Mapping[int, int] | None = None,
    init: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Replace the output layer of a model by a new one for another number of classes.

    The new layer has the type, the options, the dtype, the device and the training mode of the old one, and
    parameters that require gradients. Create the optimizer afterwards. Numbers of classes elsewhere, such as in
    a model's configuration, do not change.

    Args:
        model: the model, which changes in place.
        head: the old output layer, or its name in the model: an ``nn.Linear`` or a convolution.
        classes: number of outputs of the new layer.
        keep: classes whose weights and biases are copied, as ``{new index: old index}``.
        init: a function that initialises the new layer. None takes the initialisation of the layer's class.

    Returns:
        The new layer.

    Raises:
        ValueError: the model has no such layer, its type is not known, its weight belongs to another layer too, or
            an index is out of range. Nothing has changed then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1000))
        >>> old = model[2].weight.detach().clone()
        >>> head = shoestring.nn.swap_head(model, "2", 3, keep={0: 281, 1: 207})
        >>> head
        Linear(in_features=16, out_features=3, bias=True)
        >>> torch.equal(head.weight[0], old[281])
        True
    """
    if classes < 1:
        raise ValueError(f"swap_head: classes: expected a number of at least 1, received {classes}")
    modules = dict(model.named_modules(remove_duplicate=False))
    old = modules.get(head) if isinstance(head, str) else head
    places = [name for name, module in modules.items() if module is old and name]
    if old is None or not places:
        layers = [name for name, module in modules.items() if isinstance(module, (nn.Linear, *CONVOLUTIONS))]
        received = repr(head) if isinstance(head, str) else type(head).__name__
        raise ValueError(
            f"swap_head: head: expected a layer of the model, received {received}. "
            + candidates(head if isinstance(head, str) else "", layers[::-1])
        )
    for name, module in modules.items():
        module_parameters = {id(p) for p in module.parameters(recurse=False)}
        if module is not old and any(id(p) in module_parameters for p in old.parameters(recurse=False)):
            raise ValueError(
                f"swap_head: head: expected a layer with weights of its own, received one that shares them with {name}"
            )
    new = _like(old, classes)
    outputs = cast(nn.Linear, old).weight.shape[0]
    for index, before in (keep or {}).items():
        if not (0 <= index < classes and 0 <= before < outputs):
            raise ValueError(
                f"swap_head: keep: expected new indices below {classes} and old ones below {outputs}, received "
                f"{{{index}: {before}}}"
            )
    if init is not None:
        init(new)
    for parameter, before_parameter in zip(new.parameters(), old.parameters(), strict=True):
        for index, before in (keep or {}).items():
            parameter[index] = before_parameter[before]
    for name in places:
        parent, _, key = name.rpartition(".")
        setattr(modules[parent], key, new)
    return new


def _like(old: nn.Module, classes: int) -> nn.Module:
    """Make a layer like the old one, with its options and hooks, and another number of outputs."""
    is_known = isinstance(old, nn.Linear) or (isinstance(old, CONVOLUTIONS) and old.groups == 1)
    if not is_known or list(old._parameters) != ["weight", "bias"] or old._modules or old._buffers:
        raise ValueError(
            f"swap_head: head: expected an nn.Linear or a convolution without groups, received {type(old).__name__}"
        )
    new: Any = copy.copy(old)
    new.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(p.new_empty((classes, *p.shape[1:])))
        for name, p in old._parameters.items()
    }
    setattr(new, "out_features" if isinstance(old, nn.Linear) else "out_channels", classes)
    new.reset_parameters()
    return cast(nn.Module, new)

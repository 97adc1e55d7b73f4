"""Refuse conversions of a model of which weights are away, before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shoestring.core.errors import InputError
from shoestring.core.presence import is_away
from shoestring.core.storages import storages


class Conversion:
    """Stands for ``_apply`` of a module, which ``to()``, ``half()``, ``cuda()`` and the like call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if is_away(tensor) and not _keeps(convert, tensor):
                raise InputError(
                    f"offload_weights: to: expected no conversion of weights that are away, received one of {name}. Call "
                    "undo() of the offloaded weights first, or convert the model before offload_weights."
                )
        converted: nn.Module = type(self._module)._apply(self._module, convert, recurse)
        return converted

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., nn.Module]:
        copy = memo[id(self._module)]
        return MethodType(type(copy)._apply, copy)


def _keeps(convert: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    """Return whether a conversion leaves a tensor that is away where it is, without reading it."""
    try:
        return storages([convert(tensor.data)]).keys() == storages([tensor]).keys()
    except RuntimeError:
        return False


def refuse_conversions(model: nn.Module) -> None:
    """Let conversions of a model, and of each of its modules, raise InputError if they concern weights that are away."""
    for module in model.modules():
        module.__dict__["_apply"] = Conversion(module)


def allow_conversions(model: nn.Module) -> None:
    """Undo ``refuse_conversions``."""
    for module in model.modules():
        if isinstance(module.__dict__.get("_apply"), Conversion):
            del module.__dict__["_apply"]

"""Modules of which a copy is trained whole, beside the frozen original (PEFT's modules_to_save)."""

import copy
from typing import Any

from torch import nn

from shoestring.adapters.options import Options


class TrainedCopy(nn.Module):
    """A module and, by adapter, the copies of it that are trained; it passes for the one in use.

    Keys in ``state_dict`` are PEFT's: ``original_module.*`` and ``modules_to_save.<adapter>.*``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict()
        self.adapters: dict[str, Options] = {}
        self.active: tuple[str, ...] = ()
        self.enabled = True
        self.rows = None

    def in_use(self) -> nn.Module:
        """The copy of the active adapter, or the original."""
        chosen = [name for name in self.active if name in self.adapters] if self.enabled else []
        return self.modules_to_save[chosen[0]] if chosen else self.original_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_use()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("original_module", "modules_to_save"):  # not there yet
                raise
            return getattr(self.in_use(), name)

    def add(self, name: str, options: Options) -> None:
        """A copy for another adapter."""
        self.modules_to_save[name] = copy.deepcopy(self.original_module)
        self.adapters[name] = options

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """A copy's floating-point parameters."""
        held = self.modules_to_save[name].named_parameters() if name in self.adapters else ()
        return {key: value for key, value in held if value.is_floating_point()}

    def remove(self, name: str) -> None:
        """Drops a copy."""
        del self.modules_to_save[name], self.adapters[name]


def wrap(model: nn.Module, name: str) -> TrainedCopy:
    """Puts a TrainedCopy in the place of a module, or finds the one that is there."""
    module = model.get_submodule(name)
    if isinstance(module, TrainedCopy):
        return module
    copies = TrainedCopy(module)
    replace_module(model, name, copies)
    return copies


def unwrap(model: nn.Module, name: str) -> nn.Module:
    """Puts the module in use back in its place."""
    module = model.get_submodule(name)
    assert isinstance(module, TrainedCopy)
    return replace_module(model, name, module.in_use())


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Puts a module under a name where another one is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return module

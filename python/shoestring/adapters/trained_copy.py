"""Train a copy of a whole module and keep the frozen original (PEFT's modules_to_save)."""

import copy
from typing import Any

from torch import nn

from shoestring.adapters.options import Options


class TrainedCopy(nn.Module):
    """A frozen module and one trainable copy of it per adapter.

    Calls and attributes go to the copy of the active adapter, or to the original. The keys in ``state_dict``
    are the same as in PEFT: ``original_module.*`` and ``modules_to_save.<adapter>.*``.
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
        """Return the copy of the active adapter, or the original if no active adapter has a copy."""
        chosen = [name for name in self.active if name in self.adapters] if self.enabled else []
        return self.modules_to_save[chosen[0]] if chosen else self.original_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_use()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # in_use() reads these two attributes. Before __init__ has set them, __getattr__ and in_use()
            # would call each other without end.
            if name in ("original_module", "modules_to_save"):
                raise
            return getattr(self.in_use(), name)

    def add(self, name: str, options: Options) -> None:
        """Add a trainable copy of the original module for another adapter."""
        self.modules_to_save[name] = copy.deepcopy(self.original_module)
        self.adapters[name] = options

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the floating-point parameters of an adapter's copy, by name."""
        copied = self.modules_to_save[name].named_parameters() if name in self.adapters else ()
        return {key: value for key, value in copied if value.is_floating_point()}

    def remove(self, name: str) -> None:
        """Remove the trainable copy that belongs to an adapter."""
        del self.modules_to_save[name], self.adapters[name]


def wrap(model: nn.Module, name: str) -> TrainedCopy:
    """Replace a module of the model by a TrainedCopy around it, and return the TrainedCopy.

    If the module is already a TrainedCopy, return it unchanged.
    """
    module = model.get_submodule(name)
    if isinstance(module, TrainedCopy):
        return module
    copies = TrainedCopy(module)
    replace_module(model, name, copies)
    return copies


def unwrap(model: nn.Module, name: str) -> nn.Module:
    """Replace a TrainedCopy in the model by its active copy or the original module; return that module."""
    module = model.get_submodule(name)
    assert isinstance(module, TrainedCopy)
    return replace_module(model, name, module.in_use())


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replace the submodule ``name`` of the model by ``module``, and return ``module``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return module

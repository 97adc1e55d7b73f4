"""What every layer that has taken on adapters can do."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.adapters.options import Options

DEFAULT = "default"


class Rows(NamedTuple):
    """A different adapter for each row of the batch."""

    names: tuple[str, ...]  # the adapters of this layer that a row uses
    uses: Tensor  # (rows, len(names)), 1 where the row uses the adapter


class AdaptedLayer(nn.Module):
    """A layer with adapters, each of them a parameter or a few, keyed by the adapter's name: ``lora_A.default``.

    Not constructed: :func:`attach` gives an existing layer the class, so that hooks, shared references and the base's own
    keys in ``state_dict`` stay.

    Attributes:
        adapters: the options of each adapter, by name.
        active: names of the adapters that are added, in this layer or another.
        enabled: False: the base alone.
        rows: instead of active: which adapter each row of the batch uses.
        base_class: what the layer was.
    """

    PARAMETERS: ClassVar[
        dict[str, str]
    ]  # attribute of parameters by name -> what their keys in PEFT's files end with
    MODULES: ClassVar[tuple[str, ...]] = ()  # other attributes that hold tensors of adapters
    CAN_MIX_ROWS: ClassVar[bool] = False  # each row of the batch can have an adapter of its own
    weight: Tensor
    adapters: dict[str, Any]
    active: tuple[str, ...]
    enabled: bool
    rows: Rows | None
    base_class: type[nn.Module]

    def current(self) -> list[str]:
        """The adapters of this layer that take part now."""
        if not self.enabled:
            return []
        if self.rows is not None:
            return list(self.rows.names)
        return [name for name in self.active if name in self.adapters]

    @classmethod
    def shapes(cls, layer: Any, options: Any) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter that an adapter with these options has here, by attribute."""
        raise NotImplementedError

    def start(self, options: Any) -> dict[str, Tensor]:
        """The values that a new adapter starts with, on the CPU or where the base is."""
        raise NotImplementedError

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What the base's own parameters become with the adapters in them, rounded once to their dtype."""
        raise NotImplementedError

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of an adapter, by attribute."""
        found = ((attribute, getattr(self, attribute, {})) for attribute in self.PARAMETERS)
        return {attribute: held[name] for attribute, held in found if name in held}

    def base_weight(self) -> Tensor:
        """A tensor of the base, for its device and dtype."""
        return self.weight

    def add(self, name: str, options: Options, tensors: dict[str, Tensor]) -> None:
        """Takes on an adapter, or the new values of one whose shapes are the same, in the tensors that it has."""
        where, dtype = self.base_weight().device, wide(self.base_weight().dtype)
        own = self.tensors(name)
        if {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in tensors.items()}:
            for attribute, value in tensors.items():
                own[attribute].detach().copy_(value)
        else:
            for attribute, value in tensors.items():
                if not hasattr(self, attribute):
                    setattr(self, attribute, nn.ParameterDict())
                getattr(self, attribute)[name] = nn.Parameter(value.detach().to(where, dtype))
        self.adapters[name] = options

    def remove(self, name: str) -> None:
        """Takes an adapter off; with the last, the layer is what it was."""
        for attribute in self.tensors(name):
            held = getattr(self, attribute)
            del held[name]
            if not len(held):
                delattr(self, attribute)
        del self.adapters[name]
        if not self.adapters:
            self.detach()

    def detach(self) -> dict[str, Any]:
        """Gives the layer its former class, and returns what made it an adapted one."""
        modules = {a: self._modules.pop(a) for a in (*self.PARAMETERS, *self.MODULES) if a in self._modules}
        held = {a: self.__dict__.pop(a) for a in ("adapters", "active", "enabled", "rows", "base_class")}
        kept = {"modules": modules, "held": held, "class": type(self)}
        self.__class__ = held["base_class"]
        return kept

    def uses(self, name: str, x: Tensor) -> Tensor:
        """Which rows of x use the adapter, (rows, 1); with ``rows`` only."""
        assert self.rows is not None
        if x.shape[0] != self.rows.uses.shape[0]:
            raise ValueError(
                f"lora.adapters_per_row: adapter_names: expected one for each of the {x.shape[0]} rows of the batch that "
                f"reached a layer, received {self.rows.uses.shape[0]}"
            )
        column = self.rows.names.index(name)
        return self.rows.uses[:, column : column + 1]


def attach(layer: nn.Module, kind: type[AdaptedLayer]) -> AdaptedLayer:
    """Gives ``layer``, which stays the same object, a class with adapters; freezes its own parameters."""
    if isinstance(layer, AdaptedLayer):
        return layer
    layer.requires_grad_(False)
    layer.__dict__.pop("unmerged", None)  # of an earlier merge: there is no way back past a new adapter
    base_class = type(layer)
    layer.__class__ = kind
    assert isinstance(layer, AdaptedLayer)
    layer.base_class, layer.adapters, layer.active, layer.enabled, layer.rows = base_class, {}, (), True, None
    return layer


def reattach(layer: nn.Module, kept: dict[str, Any], device: torch.device) -> None:
    """The reverse of :meth:`AdaptedLayer.detach`."""
    layer.__class__ = kept["class"]
    layer.__dict__.update(kept["held"])
    for attribute, module in kept["modules"].items():
        layer.add_module(attribute, module.to(device))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of adapters on a base of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Every layer with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}

"""AdaptedLayer, the base class of all layers with adapters."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.adapters.options import Options

DEFAULT = "default"


class Rows(NamedTuple):
    """The adapters that the rows of a batch use, if each row has its own."""

    names: tuple[str, ...]  # the adapters of this layer that at least one row of the batch uses
    uses: Tensor  # (rows of the batch, len(names)), fp32: 1 if the row uses the adapter, else 0


class AdaptedLayer(nn.Module):
    """A layer with adapters, whose parameters are named like ``lora_A.<name of the adapter>``.

    The class is not constructed. :func:`attach` changes the class of an existing layer instead, so that
    hooks, shared references and the keys of the base in ``state_dict`` are preserved.

    Attributes:
        adapters: the options of each adapter, by name.
        active: names of the active adapters of the model, which this layer need not have.
        enabled: False disables all adapters.
        rows: replaces active if each row of the batch uses its own adapter.
        base_class: the class of the layer without adapters.
    """

    # Attribute that holds one parameter of every adapter -> ending of the parameter's key in PEFT's files.
    PARAMETERS: ClassVar[dict[str, str]]
    MODULES: ClassVar[tuple[str, ...]] = ()  # attributes besides PARAMETERS that hold adapters' tensors
    CAN_MIX_ROWS: ClassVar[bool] = False  # whether each row of the batch can use its own adapter
    weight: Tensor
    adapters: dict[str, Any]
    active: tuple[str, ...]
    enabled: bool
    rows: Rows | None
    base_class: type[nn.Module]

    def current(self) -> list[str]:
        """Return the names of this layer's adapters that the next forward uses."""
        if not self.enabled:
            return []
        if self.rows is not None:
            return list(self.rows.names)
        return [name for name in self.active if name in self.adapters]

    @classmethod
    def shapes(cls, layer: Any, options: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of an adapter with these options on the layer, by attribute."""
        raise NotImplementedError

    def start(self, options: Any) -> dict[str, Tensor]:
        """Return the initial values of a new adapter, by attribute, on the CPU or the device of the base."""
        raise NotImplementedError

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the parameters of the base with the adapters merged into them, in fp32 or fp64, by name."""
        raise NotImplementedError

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter, by attribute."""
        found = ((attribute, getattr(self, attribute, {})) for attribute in self.PARAMETERS)
        return {attribute: held[name] for attribute, held in found if name in held}

    def base_weight(self) -> Tensor:
        """Return a parameter of the base, whose device and dtype determine those of adapters."""
        return self.weight

    def add(self, name: str, options: Options, tensors: dict[str, Tensor]) -> None:
        """Add an adapter. If it exists and the shapes are the same, copy the new values into its tensors."""
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
        """Remove an adapter. When the last one is removed, the layer gets its former class back."""
        for attribute in self.tensors(name):
            held = getattr(self, attribute)
            del held[name]
            if not len(held):
                delattr(self, attribute)
        del self.adapters[name]
        if not self.adapters:
            self.detach()

    def detach(self) -> dict[str, Any]:
        """Remove all adapters and restore the former class; return the state that :func:`reattach` needs."""
        modules = {a: self._modules.pop(a) for a in (*self.PARAMETERS, *self.MODULES) if a in self._modules}
        held = {a: self.__dict__.pop(a) for a in ("adapters", "active", "enabled", "rows", "base_class")}
        kept = {"modules": modules, "held": held, "class": type(self)}
        self.__class__ = held["base_class"]
        return kept

    def uses(self, name: str, x: Tensor) -> Tensor:
        """Return which rows of x use the adapter, (rows, 1); requires that ``rows`` is set.

        Raises:
            ValueError: x has another number of rows.
        """
        assert self.rows is not None
        if x.shape[0] != self.rows.uses.shape[0]:
            raise ValueError(
                f"lora.adapters_per_row: adapter_names: expected one for each of the {x.shape[0]} rows of the batch that "
                f"reached a layer, received {self.rows.uses.shape[0]}"
            )
        column = self.rows.names.index(name)
        return self.rows.uses[:, column : column + 1]


def attach(layer: nn.Module, kind: type[AdaptedLayer]) -> AdaptedLayer:
    """Change the class of a layer to ``kind``, in place, and freeze the layer's parameters."""
    if isinstance(layer, AdaptedLayer):
        return layer
    layer.requires_grad_(False)
    # An earlier merge cannot be undone after a new adapter has been added.
    layer.__dict__.pop("unmerged", None)
    base_class = type(layer)
    layer.__class__ = kind
    assert isinstance(layer, AdaptedLayer)
    layer.base_class, layer.adapters, layer.active, layer.enabled, layer.rows = base_class, {}, (), True, None
    return layer


def reattach(layer: nn.Module, kept: dict[str, Any], device: torch.device) -> None:
    """Undo :meth:`AdaptedLayer.detach`, with the adapters moved to ``device``."""
    layer.__class__ = kept["class"]
    layer.__dict__.update(kept["held"])
    for attribute, module in kept["modules"].items():
        layer.add_module(attribute, module.to(device))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of adapters on a base of ``dtype``: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return every layer with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}

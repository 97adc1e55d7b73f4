"""Define AdaptedLayer, the base class of all layers with adapters."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.adapters.options import Options
from shoestring.adapters.values import fill
from shoestring.core.save_pretrained import watch

DEFAULT = "default"


class Rows(NamedTuple):
    """The adapters that each row of a batch uses, if different rows use different adapters."""

    names: tuple[str, ...]  # names of this layer's adapters that at least one row of the batch uses
    uses: Tensor  # (rows of the batch, len(names)), fp32: 1 where the row uses the adapter, else 0


class AdaptedLayer(nn.Module):
    """A layer with adapters, whose parameters are named like ``lora_A.<name of the adapter>``.

    No instance of the class is constructed. :func:`attach` changes the class of an existing layer instead, so
    that hooks, shared references and the keys of the layer's own weights in ``state_dict`` are preserved.

    Attributes:
        adapters: dict from the name of each adapter of this layer to its options.
        active: names of the active adapters of the model. This layer may lack some of them.
        enabled: False disables all adapters.
        rows: None, or the adapters that each row of the batch uses, in place of ``active``.
        base_class: the class of the layer without adapters.
    """

    # PARAMETERS: each key is the name of an attribute of the layer that holds a dict, adapter name ->
    # parameter. The value is the ending of these parameters' keys in PEFT's files.
    PARAMETERS: ClassVar[dict[str, str]]
    # Names of attributes of the layer that hold other data of its adapters, such as modules or constant
    # tensors. Their names are not in PARAMETERS.
    MODULES: ClassVar[tuple[str, ...]] = ()
    # whether the class supports a different adapter for each row of the batch
    CAN_MIX_ROWS: ClassVar[bool] = False
    # whether several adapters can be active at a time
    CAN_ADD: ClassVar[bool] = True
    _must_run: ClassVar[bool] = True  # set_fast_paths turns off fused paths that skip forward
    weight: Tensor
    adapters: dict[str, Any]
    active: tuple[str, ...]
    enabled: bool
    rows: Rows | None
    base_class: type[nn.Module]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch()

    def current(self) -> list[str]:
        """Return the names of this layer's adapters that the next forward uses."""
        if not self.enabled:
            return []
        if self.rows is not None:
            return list(self.rows.names)
        return [name for name in self.active if name in self.adapters]

    @classmethod
    def shapes(cls, layer: Any, options: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's parameters on ``layer``, by attribute name such as ``lora_A``."""
        raise NotImplementedError

    def start(self, options: Any) -> dict[str, Tensor]:
        """Return a new adapter's initial values by attribute name, on the CPU or the layer's device."""
        raise NotImplementedError

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the layer's own parameters with the adapters merged into them, by name, in fp32 or fp64."""
        raise NotImplementedError

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter of this layer, by attribute name, such as ``lora_A``."""
        return {a: getattr(self, a)[name] for a in self.PARAMETERS if name in getattr(self, a, {})}

    def base_weight(self) -> Tensor:
        """Return the parameter of the layer whose device and dtype determine those of its adapters."""
        return self.weight

    def add(self, name: str, options: Options, tensors: dict[str, Tensor]) -> None:
        """Add an adapter. If one with the same name and shapes exists, copy the values into its tensors."""
        device, dtype = self.base_weight().device, wide(self.base_weight().dtype)
        existing = self.tensors(name)
        if {k: v.shape for k, v in existing.items()} == {k: v.shape for k, v in tensors.items()}:
            for attribute, value in tensors.items():
                fill(existing[attribute], value)
        else:
            for attribute, value in tensors.items():
                if not hasattr(self, attribute):
                    setattr(self, attribute, nn.ParameterDict())
                getattr(self, attribute)[name] = nn.Parameter(value.detach().to(device, dtype))
        self.adapters[name] = options

    def remove(self, name: str) -> None:
        """Remove an adapter. If it was the last one, restore the layer's class without adapters."""
        for attribute in self.tensors(name):
            tensors = getattr(self, attribute)
            del tensors[name]
            if not len(tensors):
                delattr(self, attribute)
        del self.adapters[name]
        if not self.adapters:
            self.detach()

    def detach(self) -> dict[str, Any]:
        """Remove all adapters and restore the layer's former class; return what :func:`reattach` needs."""
        modules = {a: self._modules.pop(a) for a in (*self.PARAMETERS, *self.MODULES) if a in self._modules}
        state = {a: self.__dict__.pop(a) for a in ("adapters", "active", "enabled", "rows", "base_class")}
        detached = {"modules": modules, "held": state, "class": type(self)}
        self.__class__ = state["base_class"]
        return detached

    def uses(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor (rows of the batch, 1): 1 for each row that uses the adapter ``name``, else 0.

        ``self.rows``, the adapters of each row, must not be None.

        Raises:
            ValueError: x and ``self.rows`` have different numbers of batch rows.
        """
        assert self.rows is not None
        if x.shape[0] != self.rows.uses.shape[0]:
            raise ValueError(
                f"lora.adapters_per_row: adapter_names: expected one name for each of the {x.shape[0]} rows "
                f"of the batch that reached a layer, received {self.rows.uses.shape[0]}"
            )
        column = self.rows.names.index(name)
        return self.rows.uses[:, column : column + 1]


def attach(layer: nn.Module, kind: type[AdaptedLayer]) -> AdaptedLayer:
    """Change the class of a layer to ``kind``, a class with adapters, in place; freeze its parameters."""
    if isinstance(layer, AdaptedLayer):
        return layer
    watch()
    layer.requires_grad_(False)
    # An earlier merge cannot be undone after a new adapter has been added, so the weights that unmerge()
    # would restore are freed.
    layer.__dict__.pop("unmerged", None)
    base_class = type(layer)
    layer.__class__ = kind
    assert isinstance(layer, AdaptedLayer)
    layer.base_class, layer.adapters, layer.active, layer.enabled, layer.rows = base_class, {}, (), True, None
    return layer


def reattach(layer: nn.Module, detached: dict[str, Any], device: torch.device) -> None:
    """Restore the adapters that :meth:`AdaptedLayer.detach` removed from a layer; move them to ``device``."""
    layer.__class__ = detached["class"]
    layer.__dict__.update(detached["held"])
    for attribute, module in detached["modules"].items():
        layer.add_module(attribute, module.to(device))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of adapters on a layer with weights of ``dtype``: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Return a dict from module name to layer, with every layer of the model that has adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}

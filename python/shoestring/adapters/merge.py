"""Adapters into a model's weights, and out again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import AdaptedLayer, reattach
from shoestring.adapters.switch import check_known, members, set_adapter
from shoestring.adapters.trained_copy import TrainedCopy, replace_module, unwrap
from shoestring.adapters.virtual_tokens import VirtualTokens
from shoestring.quantization.quantized_linear_module import QuantizedLinear, frozen
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts


@dataclass
class MergeReport:
    """What merging lost.

    Attributes:
        layers: by layer, the norm of (new weight - exact weight) over the norm of what the adapters changed.
        error: the same of all layers together; 0 where nothing was changed.
    """

    layers: dict[str, float]
    error: float


@dataclass
class Unmerged:
    """What a merged layer keeps, to become again exactly what it was."""

    parameters: dict[str, nn.Parameter | None]
    kept: dict[str, Any]


@dataclass
class UnmergedCopy:
    """The same of a module of which a copy was trained."""

    wrapper: TrainedCopy


def merge(
    model: nn.Module,
    adapter_names: Sequence[str] | None = None,
    *,
    reversible: bool = True,
    requantize: bool = False,
) -> MergeReport:
    """Adds adapters to the weights, in place; the layers become again what they were, linear ones ``nn.Linear``.

    All adapters leave their layers. A merged weight has the base's 16- or 32-bit dtype and one rounding of error.

    Args:
        model: a model with adapters.
        adapter_names: which to add; None is those in use.
        reversible: keep the former weights and all adapters, for :func:`unmerge`; False frees them.
        requantize: a quantised weight is quantised again, in its own form, and the layer stays a ``QuantizedLinear``. What
            that rounds away is often more than a small adapter changed: the report tells. False: it is dequantised.

    Returns:
        The error, by layer.

    Raises:
        ValueError: no layer has an adapter, a name that no adapter has, or virtual tokens.
    """
    found = members(model)
    if not found:
        raise ValueError(
            "lora.merge: model: expected one with adapters, received one without; call lora.apply first"
        )
    names = list(next(iter(found.values())).active) if adapter_names is None else list(adapter_names)
    check_known("merge", model, names)
    set_adapter(model, names)  # checks that they go together
    if any(isinstance(member, VirtualTokens) for member in found.values()):
        raise ValueError(
            "lora.merge: model: expected adapters of layers, received virtual tokens, which are in no weight"
        )
    errors, totals = {}, torch.zeros(2, dtype=torch.float64)
    for place, member in found.items():
        if isinstance(member, TrainedCopy):
            merged = unwrap(model, place)
            if reversible:
                merged.unmerged = UnmergedCopy(member)  # type: ignore[assignment]
            continue
        assert isinstance(member, AdaptedLayer)
        error = _merge_layer(member, [n for n in names if n in member.adapters], reversible, requantize)
        totals += error
        errors[place] = _ratio(error)
    return MergeReport(errors, _ratio(totals))


def _ratio(error: Tensor) -> float:
    return (error[0] / error[1]).sqrt().item() if error[1] > 0 else 0.0


@torch.no_grad()
def _merge_layer(layer: AdaptedLayer, names: Sequence[str], reversible: bool, requantize: bool) -> Tensor:
    """Merges; returns the squared norms of the error and of the change."""
    exact = layer.merged(names)
    former = {key: layer._parameters.get(key) for key in exact}
    squares = torch.zeros(2, dtype=torch.float64)
    kept = layer.detach()
    for key, value in exact.items():
        old = former[key]
        new: Tensor = value.to(value.dtype if old is None else old.dtype)
        if isinstance(old, QuantizedTensor):
            if requantize:
                new = quantize_parts(value, old.quant_type, old.block_size, old.nested is not None).to(
                    old.dtype
                )
            elif type(layer) is QuantizedLinear:
                layer.__class__ = nn.Linear
        if old is not None:
            rounded, before = _dense(new, value.dtype), _dense(old, value.dtype)
            squares[0] += (rounded - value).double().square().sum().cpu()
            squares[1] += (value - before).double().square().sum().cpu()
        layer._parameters[key] = frozen(new)
    if reversible:
        layer.unmerged = Unmerged(former, kept)  # type: ignore[assignment]
    return squares


def _dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    dense = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight
    return dense.to(dtype)


def unmerge(model: nn.Module) -> nn.Module:
    """Undoes :func:`merge`: every weight has exactly its former bytes, and its adapters again.

    Raises:
        ValueError: no layer keeps its former weight.
    """
    layers = {n: m for n, m in model.named_modules() if "unmerged" in m.__dict__}
    if not layers:
        raise ValueError(
            "lora.unmerge: model: expected one merged with reversible=True, received one without former weights"
        )
    for name, layer in layers.items():
        kept = layer.__dict__.pop("unmerged")
        if isinstance(kept, UnmergedCopy):
            replace_module(model, name, kept.wrapper)
            continue
        device = next(iter(layer._parameters.values())).device
        for key, parameter in kept.parameters.items():
            old = None if parameter is None else frozen(parameter.detach().to(device))
            layer._parameters[key] = old
        reattach(layer, kept.kept, device)
    set_adapter(model, next(iter(members(model).values())).active)
    return model

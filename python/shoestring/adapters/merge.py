"""Merge adapters into the weights of a model, and undo the merge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import AdaptedLayer, reattach
from shoestring.adapters.switch import check_known, members, set_adapter
from shoestring.adapters.tied import note_ties, part_ties
from shoestring.adapters.trained_copy import TrainedCopy, replace_module, unwrap
from shoestring.adapters.virtual_tokens import VirtualTokens
from shoestring.core.dtensors import is_dtensor
from shoestring.core.fast_paths import set_fast_paths
from shoestring.core.module_argument import check_module
from shoestring.core.presence import expect_here
from shoestring.quantization.quantized_linear_module import QuantizedLinear, frozen
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts


@dataclass
class MergeReport:
    """The rounding error of a merge.

    Attributes:
        layers: for each layer name, norm(new weight - exact weight) / norm(exact weight - former weight),
            where exact weight is the merged weight before rounding.
        error: the same quotient with norms over all layers together; 0 if the adapters change nothing.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), rank=2)
        >>> report = shoestring.lora.merge(model)
        >>> report.layers, report.error
        ({'0': 0.0}, 0.0)
    """

    layers: dict[str, float]
    error: float


@dataclass
class Unmerged:
    """The former parameters and adapters of a merged layer, for :func:`unmerge`."""

    parameters: dict[str, nn.Parameter | None]
    detached: dict[str, Any]


@dataclass
class UnmergedCopy:
    """A TrainedCopy (an original module with trained copies), kept for :func:`unmerge`.

    The merge has replaced it in the model by its active copy, or by the original module.
    """

    wrapper: TrainedCopy


def merge(
    model: nn.Module,
    adapter_names: Sequence[str] | None = None,
    *,
    reversible: bool = True,
    requantize: bool = False,
) -> MergeReport:
    """Merge adapters into the weights, in place, and remove all adapters.

    The layers get their former class back. A layer whose quantised weight is dequantised becomes an
    ``nn.Linear``. A merged weight has the dtype of the base and is rounded once. If the output layer or the
    embedding of a transformers model gets another weight than the one to which it was tied,
    ``tie_word_embeddings`` of the model's configuration becomes False.

    Args:
        model: a model with adapters.
        adapter_names: the adapters to merge; None is the active ones. The other adapters are removed without
            being merged.
        reversible: True keeps the former weights and all adapters in memory, for :func:`unmerge`. False frees
            them.
        requantize: True quantises a quantised weight again, in its own format, and the layer stays a
            ``QuantizedLinear``. The rounding error is often larger than the change by a small adapter; see
            the returned report. False dequantises a quantised weight.

    Returns:
        The rounding error of each layer.

    Raises:
        ValueError: the model has no adapters or has virtual tokens, no adapter has one of the names, or
            processes have split the model.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), rank=2)
        >>> report = shoestring.lora.merge(model)
        >>> type(model[0]).__name__, report.error
        ('Linear', 0.0)
    """
    check_module("lora.merge", model)
    holders = members(model)
    if not holders:
        raise ValueError(
            "lora.merge: model: expected a model with adapters, received one without; call lora.apply first"
        )
    expect_here("lora.merge", model)
    _expect_whole("lora.merge", model)
    names = list(next(iter(holders.values())).active) if adapter_names is None else list(adapter_names)
    check_known("merge", model, names)
    set_adapter(model, names)  # set_adapter raises an error if the adapters cannot be active together
    if any(isinstance(member, VirtualTokens) for member in holders.values()):
        raise ValueError(
            "lora.merge: model: expected adapters of layers, received virtual tokens, which cannot be merged "
            "into weights"
        )
    errors, totals = {}, torch.zeros(2, dtype=torch.float64)
    done: list[tuple[nn.Parameter, nn.Parameter]] = []
    # Layers that are tied to another layer's trained tokens read them, so they are merged first.
    for name, member in sorted(holders.items(), key=lambda item: "source" not in item[1].__dict__):
        if isinstance(member, TrainedCopy):
            merged = unwrap(model, name)
            if reversible:
                merged.unmerged = UnmergedCopy(member)  # type: ignore[assignment]
            continue
        assert isinstance(member, AdaptedLayer)
        error = _merge_layer(member, [n for n in names if n in member.adapters], reversible, requantize, done)
        totals += error
        errors[name] = _ratio(error)
    note_ties(model)
    part_ties(model)
    set_fast_paths(model)
    return MergeReport(errors, _ratio(totals))


def _expect_whole(operator: str, model: nn.Module) -> None:
    """Raise a ValueError if processes have split parameters, since FSDP does not see that they are replaced."""
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"{operator}: model: expected whole parameters, received {name}, which processes have split. "
                "Save the adapters with lora.save_adapter, and load them into a model that is not split"
            )


def _ratio(error: Tensor) -> float:
    """Return the norm of the rounding error over the norm of the weight change, from their squares."""
    return (error[0] / error[1]).sqrt().item() if error[1] > 0 else 0.0


@torch.no_grad()
def _merge_layer(
    layer: AdaptedLayer,
    names: Sequence[str],
    reversible: bool,
    requantize: bool,
    done: list[tuple[nn.Parameter, nn.Parameter]],
) -> Tensor:
    """Merge a layer's adapters; return the squared norms of the rounding error and of the weight change.

    ``done`` holds pairs of a former and a merged parameter. Tied layers of which the merged weights are equal,
    as with trained tokens, stay tied.
    """
    exact = layer.merged(names)
    former = {key: layer._parameters.get(key) for key in exact}
    squares = torch.zeros(2, dtype=torch.float64)
    detached = layer.detach()
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
        merged = next((p for f, p in done if f is old and torch.equal(p, new)), None)
        layer._parameters[key] = merged = frozen(new) if merged is None else merged
        if old is not None and not isinstance(old, QuantizedTensor):
            done.append((old, merged))
    if reversible:
        layer.unmerged = Unmerged(former, detached)  # type: ignore[assignment]
    return squares


def _dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    dense = weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight
    return dense.to(dtype)


def unmerge(model: nn.Module) -> nn.Module:
    """Undo :func:`merge`: restore the exact former weights and all adapters.

    Raises:
        ValueError: the model was not merged with ``reversible=True``, or processes have split it since.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), rank=2)
        >>> report = shoestring.lora.merge(model)
        >>> model = shoestring.lora.unmerge(model)
        >>> shoestring.lora.adapter_names(model)
        ['default']
    """
    layers = {n: m for n, m in model.named_modules() if "unmerged" in m.__dict__}
    if not layers:
        raise ValueError(
            "lora.unmerge: model: expected a model that was merged with reversible=True, received one "
            "without saved weights"
        )
    _expect_whole("lora.unmerge", model)
    for name, layer in layers.items():
        unmerged = layer.__dict__.pop("unmerged")
        if isinstance(unmerged, UnmergedCopy):
            replace_module(model, name, unmerged.wrapper)
            continue
        device = next(iter(layer._parameters.values())).device
        for key, parameter in unmerged.parameters.items():
            # A parameter on the device stays the same object, since another layer may be tied to it.
            if parameter is not None and parameter.device != device:
                parameter = frozen(parameter.detach().to(device))
            layer._parameters[key] = None if parameter is None else parameter.requires_grad_(False)
        reattach(layer, unmerged.detached, device)
    note_ties(model)
    set_adapter(model, next(iter(members(model).values())).active)
    return model

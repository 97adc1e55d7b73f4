"""Load adapters from files in PEFT's format onto a model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import DEFAULT, AdaptedLayer, attach
from shoestring.adapters.apply import check_fits, check_together, options_of_layer, saved_modules
from shoestring.adapters.base_record import base_name, check_base_record, check_peft_base, refuse_base
from shoestring.adapters.conv1d import former_matrix
from shoestring.adapters.files import CONFIG, WEIGHTS, read_config, read_weights
from shoestring.adapters.initialize import take_out
from shoestring.adapters.kinds import expert_classes, layer_class
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.moe import stack_experts
from shoestring.adapters.options import (
    LoraOptions,
    Options,
    PrefixOptions,
    VeraOptions,
    VirtualOptions,
    check_name,
)
from shoestring.adapters.switch import base_biases, members, set_adapter
from shoestring.adapters.targets import former_class, selected
from shoestring.adapters.tied import tie_copies, tied_modules, untie_weight
from shoestring.adapters.tokens import TokenLayer, token_targets
from shoestring.adapters.trained_copy import TrainedCopy, wrap
from shoestring.adapters.values import fill
from shoestring.adapters.vera import Projection, share
from shoestring.adapters.virtual_tokens import VirtualTokens, attach_tokens, token_sizes, width
from shoestring.core.dtensors import is_dtensor
from shoestring.core.module_argument import check_module
from shoestring.files.read_file import shown
from shoestring.quantization.quantized_tensor import QuantizedTensor

VERA = ("base_model.vera_A", "base_model.vera_B")


@dataclass
class Content:
    """The tensors of an adapter's weights file, sorted by their purpose."""

    # layers: module name -> the parameters of its adapter; the key of a parameter is the ending of its key in
    # the file. copies: name of a module in modules_to_save -> its state_dict. biases: trained biases of the
    # base model, by name.
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    copies: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    # weights of the base's embeddings and output layer, by name
    weights: dict[str, Tensor] = field(default_factory=dict)
    # the two matrices that all layers of a VeRA adapter share, by name
    projection: dict[str, Tensor] = field(default_factory=dict)


def load_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapter_name: str = DEFAULT,
    *,
    any_base: bool = False,
) -> nn.Module:
    """Load an adapter that PEFT or :func:`save_adapter` wrote onto a model, in place, and activate it.

    A layer without an adapter of this name gets one. A layer that has an adapter of this name gets the
    values, rank and scaling of the file. If the shapes are equal, the values are copied into the existing
    tensors. As after :func:`shoestring.lora.apply`, the adapter is trainable and everything else is frozen.
    If the file does not fit, the model is not changed.

    The base must be the one on which the adapter was trained. :func:`save_adapter` describes the base in the
    file. A file of PEFT says less: the class or architecture of the base, the shapes of the layers, and
    target_modules, of which each module must have values. Quantised weights are not compared.

    An adapter that PEFT trained on transformers 4 has a LoRA for each layer of each expert of Mixtral, Qwen3-MoE and the
    like. It becomes the LoRA of the stacks of transformers 5, with the same product.

    A PEFT adapter with ``init_lora_weights`` "pissa" or "olora" that was not converted changes the weights of the
    base, as in PEFT. Rows that ``resize_token_embeddings`` had added to the embedding and the output
    layer are loaded into the model, whose vocabulary must have the same size.

    If processes have split the model, the adapter must exist before the split, and all processes must call
    this function.

    Args:
        model: the model.
        directory: folder with adapter_config.json and adapter_model.safetensors, or with a subfolder that has
            the name of the adapter and contains them.
        adapter_name: name of the adapter in the model.
        any_base: True loads an adapter of another base, if the shapes fit.

    Returns:
        The model.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is damaged, needs a feature that is not supported, or does not fit the model; the
            model is another base; or the two files were not saved together.

    Example:
        >>> import copy
        >>> base = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> model = shoestring.lora.apply(copy.deepcopy(base), rank=2)
        >>> shoestring.lora.save_adapter(model, "adapter")
        >>> other = shoestring.lora.load_adapter(base, "adapter")
        >>> torch.equal(other[0].lora_A["default"], model[0].lora_A["default"])
        True
    """
    check_module("lora.load_adapter", model)
    check_name(adapter_name)
    folder = Path(directory)
    if adapter_name != DEFAULT and os.path.lexists(folder / adapter_name / CONFIG):
        folder = folder / adapter_name
    config = read_config(folder / CONFIG)
    options = config.options
    where = f"lora.load_adapter: {folder / WEIGHTS}"
    tensors, metadata = read_weights(folder / WEIGHTS, config.digest)
    if isinstance(options, VirtualOptions):
        if not any_base:
            _check_base(model, folder, config.fields, tensors, metadata)
        _check_sizes(model, config.fields, options, f"lora.load_adapter: {folder / CONFIG}")
        _load_tokens(model, tensors, options, adapter_name, where)
        return model
    if isinstance(options, LoraOptions):
        tensors, options = stack_experts(model, tensors, options, where)
    content = _sort(model, tensors, options, where)
    plan = _plan(model, content, options, where)
    if not any_base:
        _check_base(model, folder, config.fields, tensors, metadata)
        kinds = _kinds(model, options)
        missing = [name for name in selected(model, options) if name in kinds and name not in plan]
        if missing:
            refuse_base(folder, f"{missing[0]}, one of target_modules, for which the file has no values")
    _check_split(model, adapter_name, plan, where)
    tied = {n: other for n, other in tied_modules(model, options).items() if n in content.copies}
    absent = [
        n
        for n, m in members(model).items()
        if adapter_name in m.adapters and n not in (*plan, *content.copies)
    ]
    if absent:
        raise ValueError(
            f"lora.load_adapter: {folder}: expected values for {absent[0]}, which has an adapter {adapter_name!r}; found "
            "none"
        )

    model.requires_grad_(False)
    for name in plan:
        layer = model.get_submodule(name)
        if isinstance(layer, LoraLinear) and adapter_name in getattr(layer, "initial_A", {}):
            # The initialisation of the layer's present adapter changed the base weight. Removing the adapter
            # restores the original base weight, for which the adapter in the file was trained.
            layer.remove(adapter_name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in (content.weights | content.biases).items():
        fill(parameters[name], weight)
    for name, (kind, layer_options) in plan.items():
        layer = model.get_submodule(name)
        initial = None
        if changes_base(layer_options):
            untie_weight(model, name)
            initial = take_out(layer, layer_options)
        adapted = attach(layer, kind)
        if initial is not None:
            assert isinstance(adapted, LoraLinear)
            adapted.add(adapter_name, layer_options, initial)
            adapted.keep_initial(adapter_name)
        adapted.add(adapter_name, layer_options, content.layers.get(name, {}))
        if isinstance(adapted, TokenLayer) and layer_options.tied_to is not None:
            adapted.tie(model.get_submodule(layer_options.tied_to))
    if isinstance(options, VeraOptions):
        shared = Projection(**content.projection) if content.projection else None
        share([model.get_submodule(name) for name in plan], adapter_name, options, shared)  # type: ignore[misc]
    for name, state in content.copies.items():
        wrapper = wrap(model, name)
        if adapter_name not in wrapper.adapters:
            wrapper.add(adapter_name, options)
        copy_state = wrapper.modules_to_save[adapter_name].state_dict()
        for key, value in state.items():
            fill(copy_state[key], value)
    tie_copies(model, tied, adapter_name)
    set_adapter(model, adapter_name)
    return model


def _check_base(
    model: nn.Module,
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    check_base_record(model, folder / WEIGHTS, metadata, tensors)
    check_peft_base(model, folder, config)


def _check_sizes(model: nn.Module, config: Mapping[str, Any], options: VirtualOptions, where: str) -> None:
    """Raise a ValueError if the file of a prefix divides its values among other layers and heads than the model has."""
    sizes = token_sizes(model, options) if isinstance(options, PrefixOptions) else {}
    for name, size in sizes.items():
        if config.get(name) not in (None, size):
            raise ValueError(
                f"{where}: {name}: expected {size}, as the model has, received {shown(config[name])}"
            )


def _load_tokens(
    model: nn.Module, tensors: dict[str, Tensor], options: VirtualOptions, adapter_name: str, where: str
) -> None:
    """Add virtual tokens with the values of a file to a model."""
    expected = {"prompt_embeddings": (options.tokens, width(model, options))}
    received = {key: tuple(value.shape) for key, value in tensors.items()}
    if received != expected or not tensors["prompt_embeddings"].is_floating_point():
        raise ValueError(f"{where}: expected {expected} of floating point, received {shown(received)}")
    if any(adapter_name in m.adapters for m in members(model).values() if not isinstance(m, VirtualTokens)):
        raise ValueError(
            f"{where}: expected a new adapter_name for virtual tokens, but layers have an adapter "
            f"{adapter_name!r}"
        )
    if isinstance(options, PrefixOptions):
        # A file of prefix tuning contains the computed prefix, without the projection that computed the
        # prefix.
        options = replace(options, projection=False)
    model.requires_grad_(False)
    attach_tokens(model, adapter_name, options, tensors["prompt_embeddings"], None)
    set_adapter(model, adapter_name)


def _sort(model: nn.Module, tensors: dict[str, Tensor], options: Options, where: str) -> Content:
    """Sort the tensors of an adapter's weights file by their purpose.

    Raises:
        ValueError: a tensor has a key of no known purpose, or a bias or base weight does not fit the model.
    """
    content = Content()
    kinds = _kinds(model, options)
    saved = saved_modules(model, options)
    biases = base_biases(model, "all") if options.bias != "none" else {}
    weights = _embeddings(model)
    for key, value in tensors.items():
        holder = next((name for name in saved if key.startswith(name + ".")), None)
        plain = base_name(key, biases)
        if isinstance(options, VeraOptions) and key in VERA:
            content.projection[key.removeprefix("base_model.")] = value
        elif holder is not None:
            content.copies.setdefault(holder, {})[key.removeprefix(holder + ".")] = value
        elif plain in biases:
            if value.shape != biases[plain].shape:
                raise ValueError(
                    f"{where}: {key}: expected shape {tuple(biases[plain].shape)}, received {tuple(value.shape)}"
                )
            content.biases[plain] = value
        elif (name := base_name(key, weights)) in weights:
            _check_weight(content, weights, name, value, f"{where}: {key}")
        else:
            _sort_layer(content, kinds, key, value, options, where)
    return content


def _embeddings(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and biases that a file may replace, by name.

    PEFT writes those of the input embedding and the output layer if the vocabulary was resized, or if an
    embedding has an adapter.
    """
    getters = [getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output")]
    heads = [get() for get in getters if callable(get)]
    return {
        f"{name}.{key}": getattr(module, key)
        for name, module in model.named_modules(remove_duplicate=False)
        if issubclass(former_class(module), nn.Embedding) or any(module is head for head in heads)
        for key in ("weight", "bias")
        if isinstance(getattr(module, key, None), Tensor)
    }


def _check_weight(content: Content, weights: dict[str, Tensor], name: str, value: Tensor, where: str) -> None:
    """Sort the weight ``name`` of the base into ``content``, if it fits.

    Raises:
        ValueError: the weight has another shape, or a weight that is tied to it has other values in the file.
    """
    weight = weights[name]
    if value.shape != weight.shape or not value.is_floating_point():
        raise ValueError(
            f"{where}: expected a floating-point tensor of shape {tuple(weight.shape)}, received {tuple(value.shape)}; call "
            f"model.resize_token_embeddings({value.shape[0] if value.dim() else 0}) first"
        )
    for other, values in content.weights.items():
        if weights[other] is weight and not torch.equal(values, value):
            raise ValueError(
                f"{where}: expected the values of {other}, to which the model ties it, received others; untie them first"
            )
    content.weights[name] = value


def _check_split(model: nn.Module, adapter_name: str, plan: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError if processes have split a layer that lacks the adapter, since parameters cannot be added."""
    for name, (_, options) in plan.items():
        layer: Any = model.get_submodule(name)
        split = any(is_dtensor(parameter) for parameter in layer.parameters())
        if split and (adapter_name not in getattr(layer, "adapters", {}) or changes_base(options)):
            raise ValueError(
                f"{where}: {name}: expected an adapter {adapter_name!r} in the layer, since processes have split it, found none "
                "that can be filled. Load the adapter before the model is split"
            )
        tensors = layer.tensors(adapter_name) if split else {}
        if tensors and layer.adapters[adapter_name].rank != options.rank:
            raise ValueError(
                f"{where}: {name}: expected the rank {layer.adapters[adapter_name].rank}, received {options.rank}"
            )


def changes_base(options: Options) -> bool:
    """Return whether the initialisation of an adapter with these options changed the weight of the base."""
    return isinstance(options, LoraOptions) and options.changes_base


def _kinds(model: nn.Module, options: Options) -> dict[str, type[AdaptedLayer]]:
    """Return the class that each module would get with an adapter of these options, by module name."""
    kinds = {n: kind for n, m in model.named_modules() if (kind := layer_class(m, options)) is not None}
    tokens = {name: target.kind for name, target in token_targets(model, options).items()}
    return kinds | expert_classes(model, options) | tokens


def _sort_layer(
    content: Content,
    kinds: dict[str, type[AdaptedLayer]],
    key: str,
    value: Tensor,
    options: Options,
    where: str,
) -> None:
    """Add a tensor of an adapter of one layer to ``content.layers``."""
    if not value.is_floating_point():
        raise ValueError(f"{where}: {key}: expected a floating-point tensor, received {value.dtype}")
    endings = sorted({suffix for kind in kinds.values() for suffix in kind.PARAMETERS.values()}, key=len)
    fitting = [ending for ending in endings if key.endswith("." + ending)]
    if not fitting:
        raise ValueError(f"{where}: expected keys {_expected(options)}, received {key}")
    named = [ending for ending in fitting if key.removesuffix("." + ending) in kinds]
    ending = (named or fitting)[0]
    content.layers.setdefault(key.removesuffix("." + ending), {})[ending] = value


def _expected(options: Options) -> str:
    """Describe the tensors that a file of adapters with these options may hold."""
    return f"of {type(options).__name__.removesuffix('Options')} adapters, of modules_to_save and of biases"


def _plan(
    model: nn.Module, content: Content, options: Options, where: str
) -> dict[str, tuple[type[AdaptedLayer], Any]]:
    """Return a dict from each layer in the file to the class and the adapter options that it will have.

    Raises:
        ValueError: the file does not fit the model.
    """
    modules, kinds = dict(model.named_modules()), _kinds(model, options)
    tokens = token_targets(model, options)
    plan: dict[str, tuple[type[AdaptedLayer], Any]] = {}
    # The file has no tensors of a layer that is tied to another one's tokens.
    absent: dict[str, dict[str, Tensor]] = {name: {} for name in tokens}
    for name, tensors in (absent | content.layers).items():
        module = modules.get(name)
        kind = kinds.get(name)
        if module is None or kind is None:
            actual = "none of that name" if module is None else f"a {type(module).__name__}"
            raise ValueError(
                f"{where}: {name}: expected a layer of the model that can have the adapter, found {actual}"
            )
        layer_options = tokens[name].options if name in tokens else options_of_layer(options, name, kind)
        check_fits(name, module, kind, layer_options)
        if isinstance(layer_options, LoraOptions) and layer_options.changes_base:
            _check_changed(module, layer_options, name, where)
        attributes = {suffix: attribute for attribute, suffix in kind.PARAMETERS.items()}
        content.layers[name] = tensors = {attributes.get(suffix, suffix): t for suffix, t in tensors.items()}
        expected = kind.shapes(module, layer_options)
        received = {attribute: tuple(tensor.shape) for attribute, tensor in tensors.items()}
        if expected != received:
            texts = (
                ", ".join(f"{a} {s}" for a, s in sorted(shapes.items())) for shapes in (expected, received)
            )
            raise ValueError("{}: {}: expected {}, received {}".format(where, name, *texts))
        plan[name] = (kind, layer_options)
    if isinstance(options, VeraOptions) and plan:
        _check_projection(content.projection, options, [modules[name] for name in plan], where)
    for name, state in content.copies.items():
        module = modules[name].original_module if isinstance(modules[name], TrainedCopy) else modules[name]
        expected_state = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        if expected_state != {key: tuple(value.shape) for key, value in state.items()}:
            raise ValueError(
                f"{where}: {name}: expected the keys and shapes of its state_dict, received others"
            )
    return plan


def _check_changed(module: Any, options: LoraOptions, name: str, where: str) -> None:
    """Raise a ValueError if a base weight cannot be changed as the initialisation of the adapter did."""
    check_together(module, options, name)
    if isinstance(module.weight, QuantizedTensor):
        raise ValueError(
            f"{where}: {name}: expected a dense weight for init_lora_weights {options.init!r}, which is computed again from it, "
            "received a quantised one; load the adapter onto the dense model, save it, and load that file"
        )


def _check_projection(
    matrices: dict[str, Tensor], options: VeraOptions, layers: Sequence[Any], where: str
) -> None:
    """Raise a ValueError if the two matrices that VeRA layers share are too small for the layers."""
    if not matrices and not options.save_projection:
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in matrices.items()}
    matrices_of = [former_matrix(layer) for layer in layers]
    width, height = max(m.shape[1] for m in matrices_of), max(m.shape[0] for m in matrices_of)
    vera_A, vera_B = shapes.get("vera_A", (0, 0)), shapes.get("vera_B", (0, 0))
    if vera_A[0] != options.rank or vera_A[1] < width or vera_B[0] < height or vera_B[1] != options.rank:
        raise ValueError(
            f"{where}: expected base_model.vera_A ({options.rank}, {width}) and base_model.vera_B ({height}, "
            f"{options.rank}), or larger, received {shapes}"
        )

"""Write and read adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import DEFAULT, AdaptedLayer
from shoestring.adapters.base_record import KEY as BASE
from shoestring.adapters.base_record import base_record, is_resized
from shoestring.adapters.config_digest import KEY, config_digest
from shoestring.adapters.conv1d import TransposedLinear
from shoestring.adapters.experts import LoraExperts, parameter_options
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.options import IA3Options, LoraOptions, Options, VeraOptions, VirtualOptions
from shoestring.adapters.peft_config import FileConfig, from_file, to_file
from shoestring.adapters.switch import adapter_names as names_of
from shoestring.adapters.switch import base_biases, check_known, members
from shoestring.adapters.targets import shortest_names
from shoestring.adapters.tokens import TokenLayer
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.adapters.values import whole
from shoestring.adapters.vera import VeraLinear
from shoestring.adapters.virtual_tokens import VirtualTokens, token_sizes
from shoestring.core.dtensors import is_dtensor
from shoestring.core.errors import printable
from shoestring.core.module_argument import check_module
from shoestring.files.atomic import atomic_file
from shoestring.files.read_file import MAX_JSON, is_name, read_regular, shown
from shoestring.files.safetensors_file import open_safetensors, save_safetensors
from shoestring.quantization.quantized_tensor import QuantizedTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapter_names: Sequence[str] | None = None,
    *,
    save_embedding_layers: bool | None = None,
) -> None:
    """Save the adapters of a model in PEFT's format.

    The adapter "default" is written to ``directory``, any other adapter to a subfolder with its name. Each of
    the two files of an adapter replaces the former file only after it is complete and on disk. The weights
    file contains a digest of the configuration. If a crash left the two files of different saves,
    :func:`load_adapter` refuses them.

    An adapter whose initialisation changed the base weights ("pissa", "olora", "loftq") is saved as the
    difference from the original weights, with twice the rank. It can therefore be loaded onto the original
    model. If the base is quantised, the saved adapter does not contain the rounding error of the quantised
    remainder.

    The file describes the base model: its architecture, the names and shapes of its weights, and a sample of
    their values. :func:`load_adapter` refuses another base.

    If processes have split the model, as :func:`shoestring.parallelize` does, all of them must call this
    function. The first process writes the files.

    Args:
        model: a model with adapters.
        directory: the folder, which is created if it does not exist.
        adapter_names: the adapters to save; None is all.
        save_embedding_layers: whether the files contain the weights of the input embedding and the output layer
            of the base, to which ``resize_token_embeddings`` has added rows. None is True if the vocabulary has
            another size than in the configuration of the base, where that configuration is on this machine.

    Raises:
        ValueError: the model has no adapters, or none with one of the names; or it has no embeddings to save.
        OSError: the directory cannot be written.

    Example:
        >>> import os
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), rank=2)
        >>> shoestring.lora.save_adapter(model, "adapter")
        >>> sorted(os.listdir("adapter"))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    check_module("lora.save_adapter", model)
    names = names_of(model) if adapter_names is None else check_known("save_adapter", model, adapter_names)
    if not names:
        raise ValueError(
            "lora.save_adapter: model: expected a model with adapters, received one without; "
            "call lora.apply first"
        )
    if save_embedding_layers is None:
        save_embedding_layers = is_resized(model)
    rows = _embeddings(model) if save_embedding_layers else {}
    split = any(is_dtensor(parameter) for parameter in model.parameters())
    for name in names:
        folder = Path(directory) if name == DEFAULT else Path(directory, name)
        tensors, config = _describe(model, name)
        # The collective calls of whole() run on all processes.
        tensors = {key: whole(value) for key, value in (tensors | rows).items()}
        record = base_record(model, [key.removeprefix(PREFIX) for key in tensors])
        if split and torch.distributed.get_rank() > 0:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=2, sort_keys=True)
        metadata = {"format": "pt", KEY: config_digest(config), BASE: record}
        save_safetensors(folder / WEIGHTS, tensors, metadata)
        with atomic_file(folder / CONFIG) as file:
            file.write((text + "\n").encode())
    if split:
        torch.distributed.barrier()


def _embeddings(model: Any) -> dict[str, Tensor]:
    """Return the weights and biases of the input embedding and the output layer, by their keys in the file."""
    tensors: dict[str, Tensor] = {}
    for side in ("input", "output"):
        get = getattr(model, f"get_{side}_embeddings", None)
        module = get() if callable(get) else None
        if module is None and side == "input":
            raise ValueError(
                "lora.save_adapter: save_embedding_layers: expected False for a model without get_input_embeddings, received "
                "True"
            )
        name = next((name for name, other in model.named_modules() if other is module), "")
        if module is None or isinstance(module, TrainedCopy) or not name:
            continue  # the file contains the whole copy
        inner = ".token_adapter.base_layer" if isinstance(module, TokenLayer) else ".base_layer"
        prefix = f"{PREFIX}{name}{inner if isinstance(module, AdaptedLayer) else ''}"
        weight = module.weight
        tensors[f"{prefix}.weight"] = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        if isinstance(getattr(module, "bias", None), Tensor):
            tensors[f"{prefix}.bias"] = module.bias
    return tensors


def _describe(model: nn.Module, adapter_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an adapter's tensors, by their keys in the weights file, and its configuration."""
    holders = {n: m for n, m in members(model).items() if adapter_name in m.adapters}
    layers = {n: m for n, m in holders.items() if isinstance(m, AdaptedLayer)}
    tokens = [m for m in holders.values() if isinstance(m, VirtualTokens)]
    if tokens:
        values = {"prompt_embeddings": tokens[0].values(adapter_name)}
        return values, _describe_tokens(model, tokens[0].adapters[adapter_name])
    options: dict[str, Any] = {}  # layer name -> adapter options of the layer; all have the same class
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        layer_tensors, options[name] = _plain(layer, adapter_name)
        tensors |= {
            f"{PREFIX}{name}.{layer.PARAMETERS[attribute]}": value
            for attribute, value in layer_tensors.items()
        }
    trained = {
        name: options.pop(name) for name, layer in list(layers.items()) if isinstance(layer, TokenLayer)
    }
    layers = {name: layer for name, layer in layers.items() if name not in trained}
    for name, member in holders.items():
        if isinstance(member, TrainedCopy):
            state = member.modules_to_save[adapter_name].state_dict()
            tensors |= {f"{PREFIX}{name}.{key}": value for key, value in state.items()}
    first: Options = next(iter(options.values()))
    if isinstance(first, VeraOptions) and first.save_projection:
        layer = next(iter(layers.values()))
        assert isinstance(layer, VeraLinear)
        shared = layer.vera[adapter_name]
        tensors |= {f"base_model.{key}": value for key, value in shared.state_dict().items()}
    for name, bias in base_biases(model, first.bias).items():
        parent = name.removesuffix("bias").rstrip(".")
        tensors[f"{PREFIX}{parent}.base_layer.bias" if parent in layers else PREFIX + name] = bias
    experts = {name: layer for name, layer in layers.items() if isinstance(layer, LoraExperts)}
    targets = shortest_names(model, layers.keys() - experts.keys())
    saved = [name for name, member in holders.items() if isinstance(member, TrainedCopy)]
    first = replace(
        first, target_modules=targets, exclude_modules=None, layers_to_transform=None, layers_pattern=None,
        modules_to_save=saved,
    )  # fmt: skip
    if isinstance(first, LoraOptions):
        # If a layer's rank or alpha differs from that of the first layer, rank_pattern or alpha_pattern gets
        # an entry that matches only this layer's name.
        by_name = {n: o for n, o in options.items() if n not in experts}
        parameters = {
            f"{n}.{target}": parameter_options(options[n], target)
            for n, layer in experts.items()
            for target in layer.TARGETS
        }
        by_name |= parameters
        ranks = {f"^{key}": o.rank for key, o in by_name.items() if o.rank != first.rank}
        alphas = {f"^{key}": o.alpha for key, o in by_name.items() if o.alpha != first.alpha}
        first = replace(
            first, rank_pattern=ranks, alpha_pattern=alphas, target_parameters=list(parameters),
            trainable_token_indices={n: list(o.indices) for n, o in trained.items() if o.tied_to is None},
        )  # fmt: skip
    if isinstance(first, IA3Options):
        chosen = [n for n, o in options.items() if o.feedforward]
        feedforward = shortest_names(model, chosen)
        # PEFT requires that feedforward_modules is a subset of target_modules.
        if not set(feedforward) <= set(targets):
            first, feedforward = replace(first, target_modules=sorted(layers)), sorted(chosen)
        first = replace(first, feedforward_modules=feedforward)
    transposed = any(isinstance(layer, TransposedLinear) for layer in layers.values())
    config = to_file(first) | {"fan_in_fan_out": transposed}
    return tensors, config | _describe_model(model, first.task_type)


def _describe_model(model: nn.Module, task: str | None) -> dict[str, Any]:
    base = getattr(getattr(model, "config", None), "_name_or_path", None)
    if task is None and type(model).__name__.endswith("ForCausalLM"):
        task = "CAUSAL_LM"
    return {"base_model_name_or_path": printable(base) if base else None, "task_type": task}


def _describe_tokens(model: Any, options: VirtualOptions) -> dict[str, Any]:
    task = options.task_type or "CAUSAL_LM"
    return to_file(options) | token_sizes(model, options) | _describe_model(model, task)


def _plain(layer: AdaptedLayer, name: str) -> tuple[dict[str, Tensor], Any]:
    """Return an adapter's tensors and options for one layer, relative to the original base weight.

    If the initialisation changed the base weight, the returned matrices are concatenated with the initial
    ones. Their product is then the adapter's product minus its initial product, with twice the rank.
    """
    tensors = {attribute: whole(value) for attribute, value in layer.tensors(name).items()}
    options = layer.adapters[name]
    if not isinstance(layer, LoraLinear) or name not in getattr(layer, "initial_A", {}):
        return tensors, options
    changed = {
        "lora_A": torch.cat([tensors["lora_A"], whole(layer.initial_A[name])]),
        "lora_B": torch.cat([tensors["lora_B"], -whole(layer.initial_B[name])], 1),
    }
    rank = 2 * options.rank
    alpha = options.scaling * (math.sqrt(rank) if options.rslora else rank)
    return tensors | changed, replace(options, rank=rank, alpha=alpha, init="default")


def read_config(path: Path) -> FileConfig:
    """Read adapter_config.json.

    Raises:
        ValueError: the file cannot be read, or :func:`from_file` refuses its content.
    """
    where = f"lora.load_adapter: {path}"
    return from_file(read_regular(path, where, MAX_JSON), where)


def read_weights(path: Path, digest: str) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Read adapter_model.safetensors; return its tensors by key, without PEFT's prefix, and its metadata.

    Raises:
        ValueError: the file is damaged, or holds another digest of its configuration than ``digest``. A file of PEFT
            has none.
    """
    where = f"lora.load_adapter: {path}"
    file = open_safetensors(path, f"{where}: expected a safetensors file, received a damaged one")
    metadata = file.metadata()
    if metadata.get(KEY, digest) != digest:
        raise ValueError(
            f"{where}: expected the weights that were saved with {path.with_name(CONFIG)}, received weights of another "
            "save, which was interrupted, or a changed configuration; save the adapter again"
        )
    tensors = {key: file.load(key) for key in file.tensors()}
    for key in tensors:
        if not is_name(key):
            raise ValueError(f"{where}: expected names of tensors, received {shown(key)}")
    return {key.removeprefix(PREFIX): value for key, value in tensors.items()}, metadata

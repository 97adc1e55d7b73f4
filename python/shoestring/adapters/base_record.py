"""A description of the base model of an adapter, which is stored in the metadata of the adapter's weights.

With the description, a loader refuses an adapter that was trained on another base.
"""

import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import AdaptedLayer
from shoestring.adapters.switch import members
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.adapters.virtual_tokens import VirtualTokens
from shoestring.core.presence import is_away
from shoestring.files.read_file import is_integer, is_name, is_number, parse_json, read_json, shown

KEY = "base_model"
# the name of the frozen module in a TrainedCopy, after that of the TrainedCopy
ORIGINAL = ".original_module"
# maximum number of described weights, and number of sampled values of each
TENSORS, VALUES = 48, 8
# Two roundings to bf16 of the same number differ by at most 2^-8 of it.
RELATIVE, ABSOLUTE = 2**-7, 1e-7


def base_record(model: nn.Module, keys: Iterable[str]) -> str:
    """Describe the base of a model with adapters, in JSON.

    The description has the architecture, a digest of the names and shapes of the base weights, and the shapes
    and a sample of values of evenly spaced weights. Weights that are quantised or split among processes have
    no values.

    Args:
        model: the model.
        keys: keys of the adapter's file. The base weights that it contains are left out.
    """
    weights = _unwritten(model, keys)
    unknown = _unknown(model)
    names = sorted(name for name, w in weights.items() if not w.requires_grad and name not in unknown)
    count = min(len(names), TENSORS)
    chosen = [names[i * len(names) // count] for i in range(count)]
    tensors = {
        name: {"shape": list(weights[name].shape), "values": _sample(weights[name])} for name in chosen
    }
    return json.dumps({"architecture": _architecture(model), "names": _digest(weights), "tensors": tensors})


def check_base_record(model: nn.Module, file: Path, metadata: Mapping[str, str], keys: Iterable[str]) -> None:
    """Check that an adapter's file describes the model as its base. PEFT's files have no description.

    Args:
        model: the model, with or without adapters.
        file: path of the weights file, for error messages.
        metadata: metadata of the weights file.
        keys: keys of the weights file.

    Raises:
        ValueError: the file describes another base.
    """
    if KEY not in metadata:
        return
    record = parse_json(metadata[KEY].encode(errors="replace"), f"lora.load_adapter: {file}: {KEY}")
    if not isinstance(record, dict) or not isinstance(record.get("tensors"), dict):
        raise ValueError(
            f"lora.load_adapter: {file}: {KEY}: expected an object with tensors, received {shown(record)}"
        )
    architecture, recorded = _architecture(model), record.get("architecture")
    if None not in (architecture, recorded) and architecture != recorded:
        refuse_base(file, f"the architecture {architecture!r} instead of {shown(recorded)}")
    weights = _unwritten(model, keys)
    unknown = _unknown(model)
    for name, described in record["tensors"].items():
        if not _is_description(described):
            raise ValueError(
                f"lora.load_adapter: {file}: {KEY}: expected a shape and values of each tensor, received {shown(described)}"
            )
        difference = _difference(described, weights[name]) if name in weights and name not in unknown else ""
        if difference:
            refuse_base(file, f"{difference} in {shown(name)}")
    if record.get("names") not in (None, _digest(weights)):
        refuse_base(file, "other names or shapes of weights")


def refuse_base(file: Path, received: str) -> NoReturn:
    """Raise the ValueError for an adapter of another base."""
    raise ValueError(
        f"lora.load_adapter: model: expected the base model of the adapter {file}, received one that has {received}. Load the "
        "adapter onto its own base, or insist with any_base=True (--any-base)"
    )


def base_name(key: str, known: Container[str]) -> str:
    """Return the name in ``known`` of the weight of the base that a key of a file has, or the key itself.

    PEFT inserts the names of its wrappers before the name of the parameter. A module may have such a name, too.
    """
    parent, _, last = key.rpartition(".")
    name = key
    while name not in known:
        wrapper = next((w for w in (".token_adapter.base_layer", ".base_layer") if parent.endswith(w)), None)
        if wrapper is None:
            return key
        parent = parent.removesuffix(wrapper)
        name = f"{parent}.{last}"
    return name


def _unwritten(model: nn.Module, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights of the base model, by name, without those that an adapter's file with ``keys`` contains."""
    weights = base_weights(model)
    written = {base_name(key, weights) for key in keys}
    return {name: weight for name, weight in weights.items() if name not in written}


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the base model by name, without biases, which an adapter may train in place."""
    holders = members(model)
    adapters: tuple[str, ...] = ()  # beginnings of the names of modules that belong to adapters
    for name, member in holders.items():
        parts: tuple[str, ...] = ("modules_to_save",) if isinstance(member, TrainedCopy) else ()
        parts = (*member.PARAMETERS, *member.MODULES) if isinstance(member, AdaptedLayer) else parts
        adapters += (
            (f"{name}.",) if isinstance(member, VirtualTokens) else tuple(f"{name}.{p}." for p in parts)
        )
    originals = [name for name, member in holders.items() if isinstance(member, TrainedCopy)]
    weights = {}
    for path, module in model.named_modules():
        if f"{path}.".startswith(adapters):
            continue
        copied = next((name for name in originals if f"{path}.".startswith(f"{name}{ORIGINAL}.")), None)
        if copied is not None:
            path = copied + path.removeprefix(copied + ORIGINAL)
        for key, weight in module._parameters.items():
            if weight is not None and key != "bias" and weight.is_floating_point():
                weights[f"{path}.{key}" if path else key] = weight
    return weights


def _unknown(model: nn.Module) -> set[str]:
    """Return the names of weights that the initialisation of an adapter has changed, as with PiSSA."""
    return {f"{name}.weight" for name, member in members(model).items() if hasattr(member, "initial_A")}


def base_config(name: Any) -> dict[str, Any]:
    """Return the configuration of the base model with this name, if it is on this machine; else an empty dict.

    Args:
        name: a folder, or a name on the Hub, of which the cache may have the file.
    """
    if not isinstance(name, str) or not is_name(name) or not name:
        return {}
    path = Path(name, "config.json")
    if not path.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, "config.json")
        except (ImportError, ValueError):  # it is not installed, or ``name`` is not a repository's
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    config = read_json(path, str(path))
    return config if isinstance(config, dict) else {}


def check_peft_base(model: nn.Module, file: Path, config: Mapping[str, Any]) -> None:
    """Check the statements of adapter_config.json about the base: its class, and its name if it is on this machine.

    Raises:
        ValueError: the model has another class or architecture.
    """
    mapping = config.get("auto_mapping")
    named = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    architecture = _architecture(model)
    if None not in (architecture, named) and all(c.__name__ != named for c in type(model).__mro__):
        refuse_base(file, f"the class {type(model).__name__} instead of {shown(named)}")
    expected = base_config(config.get("base_model_name_or_path")).get("model_type")
    if None not in (architecture, expected) and architecture != expected:
        refuse_base(
            file,
            f"the architecture {architecture!r} instead of that of {config['base_model_name_or_path']}, {shown(expected)}",
        )


def is_resized(model: nn.Module) -> bool:
    """Return whether the vocabulary of a transformers model differs from that of the base from which it was loaded.

    False if the configuration of the base is not on this machine.
    """
    config: Any = getattr(model, "config", None)
    values = base_config(getattr(config, "_name_or_path", None))
    text = values.get("text_config")
    base_rows = values.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return base_rows is not None and base_rows != getattr(config.get_text_config(), "vocab_size", base_rows)


def _architecture(model: nn.Module) -> str | None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else None


def _digest(weights: Mapping[str, Tensor]) -> str:
    lines = sorted(f"{name}:{list(weight.shape)}\n" for name, weight in weights.items())
    return hashlib.sha1("".join(lines).encode(errors="replace"), usedforsecurity=False).hexdigest()


@torch.no_grad()
def _sample(weight: Tensor) -> list[float]:
    """Return evenly spaced values of a weight; none if the weight cannot be read or has values that are not finite."""
    if type(weight) is not nn.Parameter or weight.is_meta or is_away(weight):
        return []
    size = weight.numel()
    positions = [(2 * k + 1) * size // (2 * VALUES) for k in range(VALUES if size else 0)]
    values = weight.detach().reshape(-1)[torch.tensor(positions, dtype=torch.long, device=weight.device)]
    sample: list[float] = values.double().tolist()
    return sample if all(map(math.isfinite, sample)) else []


def _is_description(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), list) for key in ("shape", "values"))
        and all(map(is_integer, value["shape"]))
        and all(map(is_number, value["values"]))
    )


def _difference(described: Mapping[str, Any], weight: Tensor) -> str:
    """Return how a weight differs from its description; the empty text if it does not."""
    if list(weight.shape) != described["shape"]:
        return f"the shape {list(weight.shape)} instead of {shown(described['shape'])}"
    expected, received = described["values"], _sample(weight)
    if not expected or not received:
        return ""
    near = len(expected) == len(received) and all(
        abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + ABSOLUTE
        for a, b in zip(expected, received, strict=True)
    )
    return "" if near else "other values"

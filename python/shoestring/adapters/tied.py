"""Know which modules share a weight: trained copies that stay tied, and what the configuration says about it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shoestring.adapters.options import LoraOptions, Options
from shoestring.adapters.targets import base_modules, selected
from shoestring.adapters.trained_copy import TrainedCopy

EMBEDDINGS = ("embed_tokens", "lm_head")  # the last parts of the names that PEFT takes for embeddings


def sharing(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the names of the other modules that have the same weight as the module ``name``."""
    weight = _weight(modules[name])
    return [n for n, m in modules.items() if n != name and weight is not None and _weight(m) is weight]


def _weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a module, or of the module that a trained copy wraps, or None."""
    original = module.original_module if isinstance(module, TrainedCopy) else module
    return original._parameters.get("weight")


def untie_weight(model: nn.Module, name: str) -> None:
    """Give a module a copy of its weight if other modules share it, so that a change does not reach them."""
    module = model.get_submodule(name)
    if sharing(dict(model.named_modules()), name):
        weight: Any = module.weight
        module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def note_ties(model: nn.Module) -> None:
    """Set ``tie_word_embeddings`` of the configuration to whether output layer and embedding share their weight.

    A loader ties the two by this field. Encoder-decoder models keep the field, since their forward reads it.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        heads = [getattr(module, f"get_{side}_embeddings", None) for side in ("input", "output")]
        if not hasattr(config, "tie_word_embeddings") or not all(map(callable, heads)):
            continue
        embedding, head = (get() for get in heads)  # type: ignore[misc]
        weights = [_weight(m) for m in (embedding, head) if isinstance(m, nn.Module)]
        if len(weights) == 2 and None not in weights and not getattr(config, "is_encoder_decoder", False):
            config.tie_word_embeddings = weights[0] is weights[1]
            if hasattr(module, "all_tied_weights_keys"):
                module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]


def part_ties(model: nn.Module) -> None:
    """Give weights of their own to names that are tied to each other, but no longer to the weight of the embedding.

    In an encoder-decoder model, an embedding, an encoder, a decoder and an output layer may share one weight. If
    the embedding has another one, a file has one of the other names alone, and a loader ties the rest to the
    embedding.
    """
    ties: Any = getattr(model, "all_tied_weights_keys", None)
    seen: set[int] = set()
    for target, source in (ties or {}).items():
        weight = model.get_parameter(target)
        if weight is model.get_parameter(source):
            continue
        if id(weight) in seen:
            parent, _, child = target.rpartition(".")
            copied = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            model.get_submodule(parent)._parameters[child] = copied
        seen.add(id(weight))


def tied_modules(model: nn.Module, options: Options) -> dict[str, str]:
    """Return the modules whose trained copies use the weight of another copy: name -> name of the other.

    The other module is the model's input embedding. The result is empty unless ``ensure_weight_tying`` is
    set, ``modules_to_save`` names an embedding, and the model has modules that are tied to its embedding.

    Raises:
        ValueError: target_modules names a tied embedding.
    """
    if not isinstance(options, LoraOptions) or not options.ensure_weight_tying:
        return {}
    get = getattr(model, "get_input_embeddings", None)
    inputs = get() if callable(get) else None
    modules = {name: module for name, module in base_modules(model).items() if name}
    source = next((name for name, module in modules.items() if module is inputs), None)
    tied = sharing(modules, source) if source is not None else []
    if source is None or not tied:
        return {}
    saved = any(name.rpartition(".")[2] in EMBEDDINGS for name in options.modules_to_save)
    targets = selected(model, options)
    named = [n for n in (source, *tied) if n in targets and (saved or n.rpartition(".")[2] in EMBEDDINGS)]
    if named:
        raise ValueError(
            "lora.apply: ensure_weight_tying: expected tied embeddings in modules_to_save or trainable_token_indices, "
            f"received {named[0]} in target_modules"
        )
    return dict.fromkeys(tied, source) if saved else {}


def tie_copies(model: nn.Module, tied: Mapping[str, str], adapter_name: str) -> None:
    """Give the trained copy of each tied module the weight of the copy that it is tied to."""
    for name, other in tied.items():
        target, source = (_copy(model, n, adapter_name) for n in (name, other))
        target.weight = source.weight


def _copy(model: nn.Module, name: str, adapter_name: str) -> Any:
    """Return the trained copy that an adapter has of a module."""
    wrapper: Any = model.get_submodule(name)
    return wrapper.modules_to_save[adapter_name]

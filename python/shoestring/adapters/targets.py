"""Find the modules that get an adapter, by the rules of PEFT."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shoestring.adapters.adapted import AdaptedLayer
from shoestring.adapters.options import Names, Options
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.quantization.fake_quantized_linear_module import FakeQuantizedLinear
from shoestring.quantization.quantized_linear_module import QuantizedLinear

# Rules that say how a pattern must match a name:
#   WHOLE:  re.fullmatch(pattern, name)
#   ENDING: re.match(r"(.*\.)?(pattern)$", name)
#   INSIDE: re.match(r"(^|.*\.)pattern($|\..*)", name)
#   LAYER:  re.match(r"(?:^|.*?\.)pattern\.(\d+)\.", name)
WHOLE, ENDING, INSIDE, LAYER = range(4)

# Classes of transformers, which need not be installed.
CONV1D = "transformers.pytorch_utils.Conv1D"
FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


def former_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; for a layer with adapters, the class that it had without them."""
    return module.base_class if isinstance(module, AdaptedLayer) else type(module)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes exactly what nn.Linear does, with a dense or quantised weight.

    That is nn.Linear, QuantizedLinear or Falcon's linear layer, with or without adapters.
    """
    former = former_class(module)
    return former in (nn.Linear, QuantizedLinear) or _is_named(former, FALCON)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, as in GPT-2, with or without adapters."""
    return _is_named(former_class(module), CONV1D)


def is_subclass(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether a module has a dense weight and a class derived from ``base`` whose forward is unknown.

    Three classes are excluded. nn.MultiheadAttention reads the weight of its output projection without a
    call, routers return several tensors, and the weight of a FakeQuantizedLinear is still trained.
    """
    former = former_class(module)
    weight = module._parameters.get("weight")
    return (
        issubclass(former, base)
        and former is not base
        and not is_linear(module)
        and former not in (NonDynamicallyQuantizableLinear, FakeQuantizedLinear)
        and not former.__name__.endswith("Router")
        and type(weight) is nn.Parameter
        and weight.dim() == 2
        and weight.is_floating_point()
    )


def is_any_linear(module: nn.Module) -> bool:
    """Return whether "all-linear" selects a module, unless it is the output head."""
    return is_linear(module) or is_conv1d(module) or is_subclass(module, nn.Linear)


def _is_named(kind: type[nn.Module], name: str) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == name


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the output head of a transformers model, which "all-linear" leaves out, or None."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def all_linear(model: nn.Module) -> dict[str, Any]:
    """Return every linear layer except the output head, by name, in the order of ``named_modules``."""
    head = output_head(model)
    return {n: m for n, m in base_modules(model).items() if is_any_linear(m) and m is not head}


def base_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module by name, except the modules inside trained copies."""
    modules = dict(model.named_modules())
    copied = tuple(f"{name}." for name, module in modules.items() if isinstance(module, TrainedCopy))
    return {name: module for name, module in modules.items() if not name.startswith(copied)}


def matches(name: str, names: Names | None) -> bool:
    """Return whether a module's name is among ``names``.

    Args:
        name: the name of a module.
        names: a list of whole names or of endings of names after a dot; or a regular expression for the whole
            name; or None, which matches nothing.

    Raises:
        ValueError: the regular expression is not valid, or exceeds the limits on matching.
    """
    if isinstance(names, str):
        return first_match([names], name, WHOLE)[0] == 0
    return any(name == t or name.endswith("." + t) for t in names or ())


def refuse_unmatched(
    argument: str,
    names: Iterable[str] | None,
    known: Iterable[str],
    match: Callable[[str, str], bool] = lambda name, wanted: matches(name, [wanted]),
    what: str = "names of modules",
    caller: str = "lora.apply",
) -> None:
    """Raise an error if one of the given names matches no known name.

    Args:
        argument: name of the argument that contained ``names``, for the error message.
        names: the given names; a string is one regular expression for whole names.
        known: the names that the model has.
        match: function of a known name and a given name that returns whether the given name matches.
        what: description of the given names, for the error message.
        caller: the function that the user called, for the error message.

    Raises:
        ValueError: a given name matches none of ``known``. The message contains the most similar names.
    """
    known = list(known)
    if isinstance(names, str):
        names, match, what = [names], (lambda name, pattern: matches(name, pattern)), f"a pattern for {what}"
    missing = [wanted for wanted in names or () if not any(match(name, wanted) for name in known)]
    if not missing:
        return
    near: list[str] = []
    for wanted in missing:
        parts = wanted.count(".") + 1
        endings = {".".join(name.split(".")[-parts:]) for name in known}
        near += difflib.get_close_matches(wanted.strip(), sorted(endings), n=3)
    last = sorted({name.rpartition(".")[2] for name in known})
    hint = (
        f"the nearest are {', '.join(dict.fromkeys(near))}"
        if near
        else f"this model has {', '.join(last) or 'none'}"
    )
    raise ValueError(
        f"{caller}: {argument}: expected {what}, received {', '.join(map(repr, missing))}, which "
        f"match{'es' if len(missing) == 1 else ''} nothing; {hint}"
    )


def refuse_unmatched_targets(
    model: nn.Module, names: Iterable[str], supported: Callable[[nn.Module], Any]
) -> None:
    """Raise an error if a name in ``target_modules`` matches no module.

    Args:
        model: the model.
        names: the names in ``target_modules``.
        supported: function of a module that returns whether the module can have an adapter; the error message
            suggests modules for which it does.

    Raises:
        ValueError: an entry of ``names`` matches no module.
    """
    modules = base_modules(model)
    meant = [t for t in names if not any(matches(name, [t]) for name in modules if name)]
    refuse_unmatched("target_modules", meant, [n for n, m in modules.items() if n and supported(m)])


def find_targets(
    model: nn.Module, options: Options, supported: Callable[[nn.Module], Any]
) -> dict[str, nn.Module]:
    """Return the modules that get an adapter with these options, by name.

    Raises:
        ValueError: an entry of ``options`` matches no module, or a selected module cannot have an adapter.
    """
    targets = options.target_modules
    if targets is None:
        return {}
    if not isinstance(targets, str):
        refuse_unmatched_targets(model, targets, supported)
    names = [name for name in base_modules(model) if name]
    refuse_unmatched("exclude_modules", options.exclude_modules, names)
    _refuse_unmatched_layers(options, [name for name in names if matches(name, targets)])
    modules = selected(model, options)
    for name, module in modules.items():
        if not supported(module):
            raise ValueError(
                "lora.apply: target_modules: expected linear layers (nn.Linear, QuantizedLinear or Conv1D), or for LoRA also "
                f"nn.Embedding and nn.Conv1d, 2d, 3d, received {name}, a {former_class(module).__name__}; name only these"
            )
    if not modules and targets:
        names = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if is_any_linear(m)})
        raise ValueError(
            f"lora.apply: target_modules: expected names of linear layers, received {targets!r}, which matches "
            f"nothing; this model has {', '.join(names) or 'none'}"
        )
    return modules


def selected(model: nn.Module, options: Options) -> dict[str, nn.Module]:
    """Return the modules that ``target_modules`` and the options that restrict it select, by name."""
    targets = options.target_modules
    linear = all_linear(model) if targets == "all-linear" else None
    return {
        name: module
        for name, module in base_modules(model).items()
        if name
        and (name in linear if linear is not None else matches(name, targets))
        and not _left_out(name, options)
        and _layer_chosen(name, options)
    }


def _left_out(name: str, options: Options) -> bool:
    """Return whether exclude_modules matches a module, or modules_to_save train it as a whole."""
    saved = (*options.modules_to_save, *options.heads)
    holders = [name[:end] for end, letter in enumerate(name + ".") if letter == "."]
    return (
        matches(name, options.exclude_modules)
        or any(is_inside(name, module) for module in saved)
        or any(is_saved(holder, saved) for holder in holders)
    )


def is_saved(name: str, saved: Iterable[str]) -> bool:
    """Return whether a module's name ends like one of the names in modules_to_save.

    As in PEFT, the ending need not begin after a dot: "classifier" matches DistilBERT's "pre_classifier" too.
    """
    return bool(name) and name.endswith(tuple(filter(None, saved)))


def is_inside(name: str, module: str) -> bool:
    """Return whether the regex ``module`` matches ``name`` or the name of a module that contains ``name``."""
    return first_match([module], name, INSIDE)[0] == 0


def _layer_chosen(name: str, options: Options) -> bool:
    """Return whether ``layers_to_transform`` includes the layer of this name."""
    numbers, targets = options.layers_to_transform, options.target_modules
    if numbers is None or numbers == [] or isinstance(targets, str) or name in (targets or ()):
        return True
    return _layer_number(name, options) in ([numbers] if isinstance(numbers, int) else numbers)


def _layer_number(name: str, options: Options) -> int | None:
    """Return the layer number in a module's name, such as 3 in "model.layers.3.mlp", or None without one.

    Raises:
        ValueError: the first group of layers_pattern does not match a number.
    """
    if not options.layers_pattern:
        # Take the first number in the module's name, because a later number may be the index of an expert. As
        # in PEFT, the number must follow at least two parts of the name.
        match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        number = match[1] if match else None
    else:
        patterns = (
            [options.layers_pattern]
            if isinstance(options.layers_pattern, str)
            else list(options.layers_pattern)
        )
        index, number = first_match(patterns, name, LAYER)
        number = number if index >= 0 else None
    if number is None:
        return None
    if not number.isdecimal():
        raise ValueError(
            f"lora.apply: layers_pattern: expected a pattern whose first group is the layer's number, received "
            f"{options.layers_pattern!r}, which finds {number!r}"
        )
    return int(number)


def _refuse_unmatched_layers(options: Options, names: Iterable[str]) -> None:
    numbers = options.layers_to_transform
    if numbers is None or isinstance(options.target_modules, str):
        return
    known = {number for name in names if (number := _layer_number(name, options)) is not None}
    missing = [n for n in ([numbers] if isinstance(numbers, int) else numbers) if n not in known]
    if missing and known:
        raise ValueError(
            f"lora.apply: layers_to_transform: expected numbers of layers, received {', '.join(map(str, missing))}, which "
            f"no layer has; these have target_modules: {', '.join(map(str, sorted(known)))}"
        )


def first_match(patterns: Sequence[str], name: str, rule: int) -> tuple[int, str]:
    """Return the index of the first pattern that matches ``name``, or -1, and the text of its first group.

    The result is the same as with Python's ``re``. Patterns without metacharacters are compared as plain
    text. Patterns with metacharacters run in PCRE2, with limits on steps, depth and memory.
    ``csrc/adapters/pattern.h`` lists the syntax that is not supported.

    Args:
        patterns: the regular expressions.
        name: the name to match, such as a module's name.
        rule: WHOLE, ENDING, INSIDE or LAYER, the constants of this file that say how to match.

    Raises:
        ValueError: a pattern is not supported, or exceeds the limits.
    """
    for pattern in patterns:
        if any("\ud800" <= letter <= "\udfff" for letter in pattern):
            raise ValueError(
                f"lora: pattern: expected text without lone surrogates, received {pattern[:100]!a}"
            )
    result: tuple[int, str] = torch.ops.shoestring._match_patterns(
        "lora: pattern", list(patterns), name, rule
    )
    return result


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first key of ``patterns`` that matches the name or its end after a dot."""
    index = first_match(list(patterns), name, ENDING)[0] if patterns else -1
    return default if index < 0 else list(patterns.values())[index]


def shortest_names(model: nn.Module, chosen: Iterable[str]) -> list[str]:
    """Return a short list of names that, by PEFT's rules, matches exactly the modules in ``chosen``.

    The list contains only the parts of the names after the last dot, if these parts match no other module.
    """
    chosen = set(chosen)
    last = sorted({name.rsplit(".", 1)[-1] for name in chosen})
    meant = {name for name, _ in model.named_modules() if matches(name, last)}
    return last if meant == chosen else sorted(chosen)

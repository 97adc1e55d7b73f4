"""Which modules an adapter goes to: PEFT's rules."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from shoestring.adapters.adapted import AdaptedLayer
from shoestring.adapters.options import Names, Options
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.quantization.quantized_linear_module import QuantizedLinear

# How a pattern meets a name: re.fullmatch(pattern, name), and re.match with (.*\.)?(pattern)$, (^|.*\.)pattern($|\..*) or
# (?:^|.*?\.)pattern\.(\d+)\. before it.
WHOLE, ENDING, INSIDE, LAYER = range(4)


def former_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or what it was before it took on adapters."""
    return module.base_class if isinstance(module, AdaptedLayer) else type(module)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for nn.Linear and QuantizedLinear, but not what derives from them, with adapters or without."""
    return former_class(module) in (nn.Linear, QuantizedLinear)


def output_head(model: nn.Module) -> nn.Module | None:
    """The output embedding of a transformers model, which "all-linear" leaves out; None for any other model."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def all_linear(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its name, in the order of modules, but for the output head."""
    head = output_head(model)
    return {n: m for n, m in own_modules(model).items() if is_linear(m) and m is not head}


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its name, but for what trained copies hold."""
    modules = dict(model.named_modules())
    copied = tuple(f"{name}." for name, module in modules.items() if isinstance(module, TrainedCopy))
    return {name: module for name, module in modules.items() if not name.startswith(copied)}


def matches(name: str, names: Names | None) -> bool:
    """A list names modules, or what their names end with after a dot; a string is a pattern for the whole name.

    Raises:
        ValueError: a string that is no pattern, or that exceeds the limits of a match.
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
) -> None:
    """Refuse names that match nothing.

    Args:
        argument: what the names were given as.
        names: the names; a string is one pattern for whole names.
        known: the names that could be meant.
        match: whether a known name is what a given one means.
        what: what the given names are.

    Raises:
        ValueError: a name matches none of ``known``; the message has the nearest names.
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
        f"lora.apply: {argument}: expected {what}, received {', '.join(map(repr, missing))}, which "
        f"match{'es' if len(missing) == 1 else ''} nothing; {hint}"
    )


def refuse_unmatched_targets(
    model: nn.Module, names: Iterable[str], supported: Callable[[nn.Module], Any]
) -> None:
    """Refuse names of ``target_modules`` that no module has; name the nearest that can have an adapter.

    Raises:
        ValueError: a name that matches nothing.
    """
    modules = own_modules(model)
    meant = [t for t in names if not any(matches(name, [t]) for name in modules if name)]
    refuse_unmatched("target_modules", meant, [n for n, m in modules.items() if n and supported(m)])


def find_targets(
    model: nn.Module, options: Options, supported: Callable[[nn.Module], Any]
) -> dict[str, nn.Module]:
    """The modules that ``options`` name.

    Raises:
        ValueError: a name or all of them match nothing, or what matches is not supported.
    """
    targets = options.target_modules
    if targets is None:
        return {}
    linear = all_linear(model) if targets == "all-linear" else None
    if not isinstance(targets, str):
        refuse_unmatched_targets(model, targets, supported)
    names = [name for name in own_modules(model) if name]
    refuse_unmatched("exclude_modules", options.exclude_modules, names)
    _refuse_unmatched_layers(options, [name for name in names if matches(name, targets)])
    found = {}
    for name, module in own_modules(model).items():
        chosen = name in linear if linear is not None else matches(name, targets)
        if not name or not chosen or _left_out(name, options) or not _layer_chosen(name, options):
            continue
        if not supported(module):
            raise ValueError(
                "lora.apply: target_modules: expected linear layers (nn.Linear or QuantizedLinear), or for LoRA also "
                f"nn.Embedding and nn.Conv1d, 2d, 3d, received {name}, a {former_class(module).__name__}; name only these"
            )
        found[name] = module
    if not found and targets:
        names = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if is_linear(m)})
        raise ValueError(
            f"lora.apply: target_modules: expected names of linear layers, received {targets!r}, which matches "
            f"nothing; this model has {', '.join(names) or 'none'}"
        )
    return found


def _left_out(name: str, options: Options) -> bool:
    return matches(name, options.exclude_modules) or any(
        is_inside(name, module) for module in options.modules_to_save
    )


def is_inside(name: str, module: str) -> bool:
    """True for a module named ``module`` (a regular expression, as in PEFT), or one in it."""
    return first_match([module], name, INSIDE)[0] == 0


def _layer_chosen(name: str, options: Options) -> bool:
    numbers, targets = options.layers_to_transform, options.target_modules
    if numbers is None or numbers == [] or isinstance(targets, str) or name in (targets or ()):
        return True
    return _layer_number(name, options) in ([numbers] if isinstance(numbers, int) else numbers)


def _layer_number(name: str, options: Options) -> int | None:
    """The number of the layer that a module is in; None for a module outside of layers."""
    if not options.layers_pattern:
        # The first number: a later one may count experts. PEFT wants two names before it.
        found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        number = found[1] if found else None
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
    """The index of the first pattern that matches a name, or -1, and the text of its first group.

    The verdict is that of Python's ``re``. Patterns without metacharacters are compared directly, others run in PCRE2 with
    limits of steps, depth and memory (``csrc/adapters/pattern.h`` lists the syntax that is refused).

    Args:
        rule: WHOLE, ENDING, INSIDE or LAYER.

    Raises:
        ValueError: a pattern that is refused, or that exceeds the limits.
    """
    for pattern in patterns:
        if any("\ud800" <= letter <= "\udfff" for letter in pattern):
            raise ValueError(
                f"lora: pattern: expected text without lone surrogates, received {pattern[:100]!a}"
            )
    result: tuple[int, str] = torch.ops.shoestring.match_patterns("lora: pattern", list(patterns), name, rule)
    return result


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the name, or what it ends with after a dot."""
    index = first_match(list(patterns), name, ENDING)[0] if patterns else -1
    return default if index < 0 else list(patterns.values())[index]


def shortest_names(model: nn.Module, chosen: Iterable[str]) -> list[str]:
    """A list that, by PEFT's rules, means exactly ``chosen``: last parts of names where these suffice."""
    chosen = set(chosen)
    last = sorted({name.rsplit(".", 1)[-1] for name in chosen})
    meant = {name for name, _ in model.named_modules() if matches(name, last)}
    return last if meant == chosen else sorted(chosen)

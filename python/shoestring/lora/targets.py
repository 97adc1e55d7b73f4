"""Which linear layers an adapter goes to: PEFT's rules."""

import re
from collections.abc import Iterable, Sequence

from torch import nn

from shoestring.lora.layer import LoraLinear, is_plain


def output_head(model: nn.Module) -> nn.Module | None:
    """The output embedding of a transformers model, which "all-linear" leaves out; None for any other model."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def all_linear(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by its name, in the order of modules, but for the output head."""
    head = output_head(model)
    return {n: m for n, m in model.named_modules() if (is_plain(m) or isinstance(m, LoraLinear)) and m is not head}


def matches(name: str, target_modules: str | Sequence[str]) -> bool:
    """A list names modules, or what their names end with after a dot; a string is a pattern for the whole name."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    return any(name == t or name.endswith("." + t) for t in target_modules)


def find_targets(model: nn.Module, target_modules: str | Sequence[str]) -> dict[str, nn.Linear]:
    """The layers that ``target_modules`` names.

    Raises:
        ValueError: nothing matches, or what matches is not a linear layer.
    """
    if target_modules == "all-linear":
        found = all_linear(model)
    else:
        found = {}
        for name, module in model.named_modules():
            if not name or not matches(name, target_modules):
                continue
            if not (is_plain(module) or isinstance(module, LoraLinear)):
                raise ValueError(
                    "lora.apply: target_modules: expected linear layers (nn.Linear or QuantizedLinear), received "
                    f"{name}, a {type(module).__name__}; name only linear layers"
                )
            found[name] = module
    if not found:
        names = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if is_plain(m)})
        raise ValueError(
            f"lora.apply: target_modules: expected names of linear layers, received {target_modules!r}, which matches "
            f"nothing; this model has {', '.join(names) or 'none'}"
        )
    return found


def shortest_names(model: nn.Module, chosen: Iterable[str]) -> list[str]:
    """A list that, by PEFT's rules, means exactly ``chosen``: last parts of names where these suffice."""
    chosen = set(chosen)
    last = sorted({name.rsplit(".", 1)[-1] for name in chosen})
    meant = {name for name, _ in model.named_modules() if matches(name, last)}
    return last if meant == chosen else sorted(chosen)

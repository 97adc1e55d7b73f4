"""Select the stacked weights of a mixture of experts by the names that its layers have in checkpoints.

transformers 5 stacks the experts' linear layers into two parameters, gate_up_proj and down_proj, and makes
the router a module with a parameter. PEFT accepts the former names of these layers in target_modules, and
counts the layers among "all-linear". Adapters that were configured for transformers 4 therefore stay the same, and files
of them are loaded.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoestring.adapters.options import LoraOptions
from shoestring.adapters.targets import all_linear, base_modules, matches

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(lora_[AB])\.weight")
FORMER_BLOCK = ".block_sparse_moe."  # in transformers 4, the mixture of Mixtral; now "mlp"
# Names of the layers of an expert that are now stacked: gate and up, which share one parameter, and down.
FAMILIES = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}
ROUTER, GATE_UP, DOWN = "gate.weight", "gate_up_proj", "down_proj"


def family(model: nn.Module) -> str | None:
    """Return the key of FAMILIES for a transformers model with stacked experts; None for any other model."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        return None
    try:
        from transformers import conversion_mapping
    except ImportError:  # transformers 4 has no stacked experts
        return None
    known: dict[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    key = "mixtral" if kind == "mixtral" else known.get(kind)
    return key if key in FAMILIES else None


def with_experts(model: nn.Module, options: LoraOptions) -> LoraOptions:
    """Replace the former names of stacked layers in target_modules by target_parameters, as PEFT does.

    The adapter of gate_up_proj has the rank and alpha of both its layers together, so the scaling is theirs.

    Raises:
        ValueError: only one of the two layers in gate_up_proj is named, or a regular expression matches some
            of the modules of a name and not all of them.
    """
    kind, targets = family(model), options.target_modules
    if kind is None or targets is None:
        return options
    gate, up, down = FAMILIES[kind]
    stacked = {"gate": ROUTER, gate: GATE_UP, up: GATE_UP, down: DOWN}
    pattern = targets if isinstance(targets, str) else None
    if pattern is not None:
        targets = _last_names(model, pattern, stacked)
    meant = {name: _stacked_name(name, stacked) for name in targets}
    both = {old for old in meant.values() if old in (gate, up)}
    if len(both) == 1:
        raise ValueError(
            f"lora.apply: target_modules: expected both {gate} and {up}, which are stacked in {GATE_UP}, or neither; "
            f"received {both.pop()!r} alone"
        )
    parameters = dict.fromkeys(stacked[old] for old in meant.values() if old is not None)
    if pattern is not None:
        known = [name for name, _ in model.named_parameters()]
        parameters = {p: None for p in parameters if any(matches(name, [p]) for name in known)}
    if not parameters and pattern not in (None, "all-linear"):
        return options
    key = rf".*\.{GATE_UP}"
    ranks, alphas = ({key: 2 * options.rank}, {key: 2 * options.alpha}) if both else ({}, {})
    return replace(
        options,
        target_modules=[name for name, old in meant.items() if old is None],
        target_parameters=list(dict.fromkeys((*options.target_parameters, *parameters))),
        rank_pattern={**options.rank_pattern, **ranks},
        alpha_pattern={**options.alpha_pattern, **alphas},
    )


def _stacked_name(name: str, stacked: Iterable[str]) -> str | None:
    """Return the name in ``stacked`` that a target names alone or at its end, or None."""
    return next((old for old in stacked if name == old or name.endswith("." + old)), None)


def _last_names(model: nn.Module, pattern: str, stacked: dict[str, str]) -> list[str]:
    """Return the last parts of the names of the layers that a pattern matches, stacked ones included."""
    if pattern == "all-linear":
        return list(dict.fromkeys([*(name.rpartition(".")[2] for name in all_linear(model)), *stacked]))
    candidates = [name for name in base_modules(model) if name]
    for name, parameter in model.named_parameters():
        container, _, last = name.rpartition(".")
        former = [old for old, new in stacked.items() if new == last] if parameter.dim() == 3 else []
        candidates += [f"{container}.{old}" for old in former]
    chosen = {name for name in candidates if matches(name, pattern)}
    last_names = list(dict.fromkeys(name.rpartition(".")[2] for name in sorted(chosen)))
    partly = [name for name in candidates if name not in chosen and name.rpartition(".")[2] in last_names]
    if partly:
        raise ValueError(
            "lora.apply: target_modules: expected a pattern that matches all modules of a name, since PEFT selects the "
            f"layers of a mixture of experts by the last part of their names; received {pattern!r}, which does not "
            f"match {partly[0]}; give names and layers_to_transform"
        )
    return last_names


def stack_experts(
    model: nn.Module, tensors: Mapping[str, Tensor], options: LoraOptions, where: str
) -> tuple[dict[str, Tensor], LoraOptions]:
    """Return an adapter of transformers 4, which has a LoRA for each layer of each expert, in the form of stacks.

    The LoRA of gate and up become one: the rows of A one below the other, and B block by block.

    Args:
        tensors: the tensors of the adapter, by name. Others are returned as they are.
        options: the options in the file.
        where: what begins errors.

    Raises:
        ValueError: a layer of an expert is missing, or the layers have different shapes.
    """
    kind = family(model)
    if kind is None or not any(EXPERT.fullmatch(key) for key in tensors):
        return dict(tensors), options
    gate, up, down = FAMILIES[kind]
    result: dict[str, Tensor] = {}
    found: dict[str, dict[tuple[int, str, str], Tensor]] = {}
    for key, value in tensors.items():
        key = key.replace(FORMER_BLOCK, ".mlp.") if kind == "mixtral" else key
        match = EXPERT.fullmatch(key)
        if match is None:
            result[key] = value
        else:
            module, number, layer, letter = match.groups()
            found.setdefault(module, {})[int(number), layer, letter] = value
    for module, parts in found.items():
        layers = {layer for _, layer, _ in parts}
        experts = 1 + max(number for number, _, _ in parts)
        groups = {key: of for key, of in ((GATE_UP, (gate, up)), (DOWN, (down,))) if layers & {*of}}
        expected = {
            (e, layer, f"lora_{x}")
            for e in range(experts)
            for of in groups.values()
            for layer in of
            for x in "AB"
        }
        if expected != parts.keys():
            number, layer, letter = min(expected ^ parts.keys())
            raise ValueError(
                f"{where}: {module}: expected {letter} of {layer} of each of {experts} experts, and no other layers, received "
                f"{'none' if (number, layer, letter) in expected else 'one'} of expert {number}"
            )
        for depth, (_, of) in enumerate(reversed(groups.items())):
            prefix = f"{module}.{'base_layer.' * depth}"
            try:
                a = [torch.cat([parts[e, layer, "lora_A"] for layer in of]) for e in range(experts)]
                b = [torch.block_diag(*(parts[e, layer, "lora_B"] for layer in of)) for e in range(experts)]
                result[f"{prefix}lora_A.weight"] = torch.cat(a)
                result[f"{prefix}lora_B.weight"] = torch.stack(b, -1).flatten(1)  # (out, rank * experts)
            except RuntimeError:
                raise ValueError(
                    f"{where}: {module}: expected the same shapes for all experts, received others"
                ) from None
    return result, with_experts(model, options)

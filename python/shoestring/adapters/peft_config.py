"""Convert PEFT configurations (objects or adapter_config.json) to shoestring's options, and back."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn

from shoestring.adapters.options import (
    TASKS,
    IA3Options,
    LoraOptions,
    Options,
    PrefixOptions,
    PromptOptions,
    VeraOptions,
    VirtualOptions,
)
from shoestring.adapters.targets import matches
from shoestring.adapters.virtual_tokens import token_sizes
from shoestring.files.read_file import is_integer, is_name, is_number, shown

# Values of init_lora_weights after which the base weights are the original ones, and those that changed the base
# weights to what can be computed again from the original ones.
UNCHANGED = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
CHANGED = ("pissa", "olora")
SHARED = {
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers_to_transform",
    "layers_pattern": "layers_pattern",
    "modules_to_save": "modules_to_save",
    "task_type": "task_type",
}
FIELDS: dict[str, tuple[type[Options], dict[str, str]]] = {
    "LORA": (
        LoraOptions,
        SHARED
        | {
            "r": "rank",
            "lora_alpha": "alpha",
            "rank_pattern": "rank_pattern",
            "alpha_pattern": "alpha_pattern",
            "use_rslora": "rslora",
            "use_dora": "dora",
            "lora_dropout": "dropout",
            "lora_bias": "lora_bias",
            "bias": "bias",
            "target_parameters": "target_parameters",
            "trainable_token_indices": "trainable_token_indices",
            "ensure_weight_tying": "ensure_weight_tying",
        },
    ),
    "VERA": (
        VeraOptions,
        {k: v for k, v in SHARED.items() if k != "exclude_modules"}
        | {
            "r": "rank",
            "vera_dropout": "dropout",
            "d_initial": "d_initial",
            "projection_prng_key": "seed",
            "save_projection": "save_projection",
            "bias": "bias",
        },
    ),
    "IA3": (
        IA3Options,
        {k: v for k, v in SHARED.items() if not k.startswith("layers_")}
        | {"feedforward_modules": "feedforward_modules"},
    ),
    "PREFIX_TUNING": (
        PrefixOptions,
        {
            "num_virtual_tokens": "tokens",
            "prefix_projection": "projection",
            "encoder_hidden_size": "hidden_size",
            "task_type": "task_type",
        },
    ),
    "PROMPT_TUNING": (PromptOptions, {"num_virtual_tokens": "tokens", "task_type": "task_type"}),
}
# Default values of PEFT that differ from shoestring's. They apply to fields that a configuration file or
# object lacks.
DEFAULTS: dict[str, dict[str, Any]] = {"LORA": {"rank": 8, "alpha": 8}}
# Limits on values in configuration files, because a file may come from an untrusted source.
# maximum number of names in a JSON list or object; each name is compared with every module
MOST_NAMES = 100_000
# maximum number of names in modules_to_save or target_parameters; each is compared several times
MOST_MODULES = 10_000
# maximum rank of VeRA. Its two shared matrices may be drawn from a seed instead of read; with this rank and
# 4096 features, each takes 1 GiB.
VERA_RANK = 65_536

Check = tuple[Callable[[Any], bool], str]


def _names(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(is_name, value))


def _mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and len(value) <= MOST_NAMES and all(map(fits, value.values()))
    )


def _integer(least: int, most: int = 2**31 - 1) -> Check:
    return lambda value: is_integer(value) and least <= value <= most, f"an integer from {least} to {most}"


def _ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_NAMES and all(map(is_integer, value))


NUMBER: Check = (is_number, "a finite number")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
TEXT: Check = (is_name, "a name")
NAMES: Check = (
    lambda value: isinstance(value, str) or _names(MOST_NAMES)(value),
    "a pattern or a list of names",
)
MODULES: Check = (_names(MOST_MODULES), f"a list of at most {MOST_MODULES} names")
RANKS: Check = (_mapping(_integer(1)[0]), "an object of integers of at least 1")
ALPHAS: Check = (_mapping(is_number), "an object of finite numbers")
TOKENS: Check = (
    lambda value: (
        _ids(value)
        or (isinstance(value, dict) and len(value) <= MOST_MODULES and all(map(_ids, value.values())))
    ),
    f"a list of at most {MOST_NAMES} token ids, or an object of such lists",
)
LAYERS: Check = (
    lambda value: is_integer(value) or (isinstance(value, list) and all(map(is_integer, value))),
    "an integer or a list of integers",
)
# Type and range checks of values from JSON. Each key is the name of a shoestring option. Each value is a
# check and a description of the expected value for error messages.
CHECKS: dict[str, Check] = {
    "target_modules": NAMES, "exclude_modules": NAMES, "layers_pattern": NAMES, "feedforward_modules": NAMES,
    "modules_to_save": MODULES, "target_parameters": MODULES, "layers_to_transform": LAYERS, "rank": _integer(1),
    "alpha": NUMBER, "rank_pattern": RANKS, "alpha_pattern": ALPHAS, "rslora": FLAG, "dora": FLAG, "dropout": NUMBER,
    "lora_bias": FLAG, "bias": TEXT, "d_initial": NUMBER, "seed": _integer(-(2**63), 2**63 - 1), "save_projection": FLAG,
    "tokens": _integer(1), "projection": FLAG, "hidden_size": _integer(1), "task_type": TEXT,
    "trainable_token_indices": TOKENS, "ensure_weight_tying": FLAG,
}  # fmt: skip


@functools.cache
def known_fields(method: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the fields of a method's PEFT configuration, and those of them that must be off.

    csrc/adapters/config_fields.cpp lists them. A field that must be off changes what the adapter computes, and is
    not supported.
    """
    known, refused = torch.ops.shoestring._adapter_config_fields(method)
    return frozenset(known), tuple(refused)


def from_peft(config: Any, model: nn.Module) -> Options:
    """Convert a PEFT configuration object to options; its ``peft_type`` selects the method.

    ``model`` is the model that will have the adapter. PEFT has defaults by architecture for target_modules.

    Raises:
        ValueError: the method or an option is not supported; the message names it.
    """
    method = _method(getattr(config, "peft_type", None), "lora.apply: config: peft_type")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    defaults = {
        f.name: f.default
        if f.default is not MISSING
        else f.default_factory()
        if f.default_factory is not MISSING
        else None
        for f in fields(config)
    }
    options = _translate(method, values, "lora.apply: config")
    options |= _beginning(values)
    if "target_modules" in values:
        options |= _default_targets(method, values, model)
    known, _ = known_fields(method)
    for name, value in values.items():
        if name not in known and value != defaults[name]:
            _refuse("lora.apply: config", name, defaults[name], value)
    result = FIELDS[method][0](**options)
    sizes = token_sizes(model, result) if isinstance(result, VirtualOptions) else {}
    for name, size in sizes.items():
        if values.get(name) not in (None, size):
            _refuse("lora.apply: config", name, size, values[name])
    return result


def from_file(values: Mapping[str, Any], place: str) -> Options:
    """Convert the content of adapter_config.json to options.

    PEFT writes all its fields. A newer PEFT has more of them, which are accepted if their value says that they are
    off: null, false or empty.

    Args:
        values: the content of the file.
        place: the beginning of error messages.

    Raises:
        ValueError: the method or an option is not supported, a field is not known, or a value has a wrong type or
            range; the message names it.
    """
    method = _method(values.get("peft_type"), f"{place}: peft_type")
    options = _translate(method, values, place)
    known, _ = known_fields(method)
    for name, value in values.items():
        if name not in known and not _is_off(value):
            raise ValueError(
                f"{place}: {shown(name)}: expected null, false or an empty value, since this version of shoestring does "
                f"not know the field for {method}, received {shown(value)}. Use a newer version, or remove the field if "
                "the adapter does not depend on it"
            )
    if method == "LORA":
        options["init"] = _changed_base(values.get("init_lora_weights"), place)
    theirs = {ours: name for name, ours in FIELDS[method][1].items()}
    for name, value in options.items():
        if name == "init":
            continue
        fits, expected = _integer(1, VERA_RANK) if (method, name) == ("VERA", "rank") else CHECKS[name]
        if not fits(value):
            raise ValueError(f"{place}: {theirs[name]}: expected {expected}, received {shown(value)}")
    virtual = issubclass(FIELDS[method][0], VirtualOptions)
    if not virtual and not any(options.get(name) for name in ("target_modules", "target_parameters")):
        # If the configuration names no modules, the keys in adapter_model.safetensors select the modules.
        options["target_modules"] = ()
    return FIELDS[method][0](**options)


def _changed_base(init: Any, place: str) -> str:
    """Return the option ``init`` of an adapter in a file: how its base was changed, or "default".

    PEFT does not store what the initialisation made of the base weights. It computes "pissa" and "olora" again
    when it loads the adapter.

    Raises:
        ValueError: the changed base weights are not known.
    """
    if isinstance(init, str) and init in CHANGED:
        return init
    if any(init is value or (isinstance(init, str) and init == value) for value in UNCHANGED):
        return "default"
    raise ValueError(
        f"{place}: init_lora_weights: expected one of {', '.join(map(repr, (*UNCHANGED[:2], *UNCHANGED[3:], *CHANGED)))}, "
        f"after which the base weights are known, received {shown(init)}. Convert the adapter with PEFT's "
        "path_initial_model_for_weight_conversion, or merge it there"
    )


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (list, tuple, dict)) and not value)


def _method(kind: Any, place: str) -> str:
    method = getattr(kind, "value", kind)
    if not isinstance(method, str) or method not in FIELDS:
        known = ", ".join(repr(name) for name in FIELDS)
        raise ValueError(f"{place}: expected one of {known}, received {shown(method)}")
    return method


def _translate(method: str, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name in known_fields(method)[1]:
        # An empty dict turns such a field on in PEFT, with the defaults of its options.
        if not _is_off(values.get(name)) or isinstance(values.get(name), dict):
            _refuse(place, name, False, values[name])
    options = dict(DEFAULTS.get(method, {}))
    for theirs, ours in FIELDS[method][1].items():
        if values.get(theirs) is not None:
            options[ours] = values[theirs]
    task = options.pop("task_type", None)
    task = getattr(task, "value", task)  # PEFT's objects have an enumeration, its files a string
    if isinstance(task, str) and task in TASKS:
        options["task_type"] = task
    return options


def _default_targets(method: str, values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the modules that PEFT adapts in this architecture if a configuration object names none.

    Raises:
        ValueError: PEFT has no defaults for the architecture.
    """
    import peft.utils  # installed, since the configuration is an object of PEFT

    options: dict[str, Any] = {}
    architecture = getattr(getattr(model, "config", None), "model_type", None)

    def default(kind: str, chosen: Any = None) -> Any:
        names = getattr(peft.utils, f"TRANSFORMERS_MODELS_TO_{kind}_MODULES_MAPPING").get(architecture)
        if names is None or isinstance(names, str):
            return names
        # The defaults list the names of several versions of a model, which has only some of them.
        known = [module for module, _ in model.named_modules() if chosen is None or matches(module, chosen)]
        return [name for name in names if any(matches(module, [name]) for module in known)]

    targets = values["target_modules"]
    if targets is None:
        targets = default(f"{method}_TARGET")
        if targets is None and not values.get("target_parameters"):
            raise ValueError(
                "lora.apply: config: target_modules: expected names, since PEFT has no defaults for the architecture "
                f"{architecture!r}, received None; name them, or give 'all-linear'"
            )
        options["target_modules"] = targets
    elif isinstance(targets, str) and targets.lower() == "all-linear":
        options["target_modules"] = "all-linear"
    if method == "IA3" and values["feedforward_modules"] is None:
        names = default("IA3_FEEDFORWARD", r".*" if targets == "all-linear" else targets)
        if names is None:
            raise ValueError(
                "lora.apply: config: feedforward_modules: expected names, since PEFT has no defaults for the "
                f"architecture {architecture!r}, received None; name them, or give []"
            )
        options["feedforward_modules"] = names
    return options


def _beginning(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a PEFT configuration object that determine the adapter's initial values.

    Raises:
        ValueError: a value is not supported.
    """
    options: dict[str, Any] = {}
    for name in ("init_weights", "init_ia3_weights"):
        if values.get(name) is False:
            _refuse("lora.apply: config", name, True, False)
    if "init_lora_weights" in values:
        init = values["init_lora_weights"]
        options["init"] = {True: "default", False: "random"}.get(init, init)
    if "prompt_tuning_init" in values:
        options["init"] = _prompt_init(values["prompt_tuning_init"])
    if "prefix_projection" in values and values.get("init_weights") is not None:
        options["init"] = values["init_weights"]
    if "target_modules" not in values:
        return options
    for name in ("corda_config", "lora_ga_config"):
        if values.get(name):
            _refuse("lora.apply: config", name, None, values[name])
    loftq = values.get("loftq_config") or {}
    if loftq.get("loftq_bits", 4) != 4:
        _refuse(
            "lora.apply: config",
            "loftq_bits",
            "4, or quantize as an argument of lora.apply",
            loftq["loftq_bits"],
        )
    options |= {"loftq_iterations": loftq["loftq_iter"]} if "loftq_iter" in loftq else {}
    eva = values.get("eva_config")
    if eva is not None and eva != type(eva)():
        _refuse("lora.apply: config", "eva_config", "its defaults; lora.initialize_eva takes rho", eva)
    return options


def _prompt_init(kind: Any) -> str:
    name = getattr(kind, "value", kind)
    if name not in ("RANDOM", "SAMPLE_VOCAB"):
        expected = "RANDOM or SAMPLE_VOCAB; of a text give PromptOptions(init=...) its token ids"
        _refuse("lora.apply: config", "prompt_tuning_init", expected, name)
    return "random" if name == "RANDOM" else "vocabulary"


def _refuse(place: str, name: str, expected: Any, received: Any) -> None:
    raise ValueError(
        f"{place}: {name}: expected {expected!r}, since nothing else is supported here, received {shown(received)}"
    )


def to_file(options: Options) -> dict[str, Any]:
    """Convert options to the content of adapter_config.json. Fields left out have PEFT's defaults."""
    method, (_, names) = next((m, f) for m, f in FIELDS.items() if f[0] is type(options))
    values = {theirs: getattr(options, ours) for theirs, ours in names.items()}
    values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
    nothing = ("modules_to_save", "target_parameters", "trainable_token_indices")
    values |= {key: None for key in nothing if key in values and not values[key]}
    begin = {"init_lora_weights": True} if method == "LORA" else {}
    return values | begin | {"peft_type": method, "inference_mode": True}

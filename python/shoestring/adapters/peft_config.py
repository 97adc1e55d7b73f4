"""Convert PEFT configurations (objects or adapter_config.json) to shoestring's options, and back."""

import functools
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

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
from shoestring.core.errors import printable
from shoestring.files.read_file import shown

METHODS: dict[str, type[Options]] = {
    "LORA": LoraOptions,
    "VERA": VeraOptions,
    "IA3": IA3Options,
    "PREFIX_TUNING": PrefixOptions,
    "PROMPT_TUNING": PromptOptions,
}


class FileConfig(NamedTuple):
    """The content of adapter_config.json: the options, all fields by PEFT's names, and the digest."""

    options: Options
    fields: dict[str, Any]
    digest: str


@functools.cache
def fields_of(method: str) -> dict[str, str]:
    """Return the fields of a method's PEFT configuration, each with its option's name; "" if it is not read.

    csrc/adapters/config_fields.cpp lists them.
    """
    return dict(torch.ops.shoestring._adapter_config_fields(method))


def _read(text: bytes, where: str) -> tuple[str, dict[str, Any], str]:
    """Return the method, the options and the digest of the text of an adapter_config.json."""
    method, fields, digest = torch.ops.shoestring._read_adapter_config(printable(where), text, list(METHODS))
    options = json.loads(fields)
    if options.get("task_type") not in TASKS:
        options.pop("task_type", None)
    return method, options, digest


def from_peft(config: Any, model: nn.Module) -> Options:
    """Convert a PEFT configuration object to options; its ``peft_type`` selects the method.

    ``model`` is the model that will have the adapter. PEFT has defaults by architecture for target_modules.

    Raises:
        ValueError: the method or an option is not supported; the message names it.
    """
    kind = getattr(config, "peft_type", None)
    kind = getattr(kind, "value", kind)
    values = {field.name: getattr(config, field.name) for field in fields(config)} if kind else {}
    known = fields_of(str(kind))
    # _beginning reads init_lora_weights, of which a file has other values.
    read = {name: value for name, value in values.items() if name in known and name != "init_lora_weights"}
    text = json.dumps(read | {"peft_type": kind}, default=_plain)
    method, options, _ = _read(text.encode(), "lora.apply: config")
    options |= _beginning(values)
    if "target_modules" in values:
        options |= _default_targets(method, values, model)
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in known and values[field.name] != default:
            _refuse("lora.apply: config", field.name, default, values[field.name])
    result = METHODS[method](**options)
    sizes = token_sizes(model, result) if isinstance(result, VirtualOptions) else {}
    for name, size in sizes.items():
        if values.get(name) not in (None, size):
            _refuse("lora.apply: config", name, size, values[name])
    return result


def _plain(value: Any) -> Any:
    """Return the value of a field of a PEFT configuration object in the form that a file has."""
    return sorted(value) if isinstance(value, (set, frozenset, range)) else repr(value)


def from_file(text: bytes, where: str) -> FileConfig:
    """Read the text of an adapter_config.json.

    PEFT writes all its fields. A newer PEFT has more of them, which are accepted if their value says that they are
    off: null, false or empty.

    Args:
        text: the text of the file.
        where: the beginning of error messages.

    Raises:
        ValueError: the text is no JSON object, the method or an option is not supported, a field is not known, or a
            value has a wrong type or range; the message names the field.
    """
    method, options, digest = _read(text, where)
    virtual = issubclass(METHODS[method], VirtualOptions)
    if not virtual and not any(options.get(name) for name in ("target_modules", "target_parameters")):
        # If the configuration names no modules, the keys in adapter_model.safetensors select the modules.
        options["target_modules"] = ()
    return FileConfig(METHODS[method](**options), json.loads(text), digest)


def _default_targets(method: str, values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the modules that PEFT adapts in this architecture if a configuration object names none.

    Raises:
        ValueError: PEFT has no defaults for the architecture.
    """
    import peft.utils  # PEFT is installed, since the configuration is its object

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
    """Return ``PromptOptions.init`` for PEFT's prompt_tuning_init."""
    name = getattr(kind, "value", kind)
    if name not in ("RANDOM", "SAMPLE_VOCAB"):
        expected = "RANDOM or SAMPLE_VOCAB; of a text give PromptOptions(init=...) its token ids"
        _refuse("lora.apply: config", "prompt_tuning_init", expected, name)
    return "random" if name == "RANDOM" else "vocabulary"


def _refuse(where: str, name: str, expected: Any, received: Any) -> None:
    raise ValueError(
        f"{where}: {name}: expected {expected!r}, since nothing else is supported here, received {shown(received)}"
    )


def to_file(options: Options) -> dict[str, Any]:
    """Convert options to the content of adapter_config.json. Fields left out have PEFT's defaults."""
    method = next(method for method, kind in METHODS.items() if kind is type(options))
    values = {theirs: getattr(options, ours) for theirs, ours in fields_of(method).items() if ours}
    values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
    nothing = ("modules_to_save", "target_parameters", "trainable_token_indices")
    values |= {key: None for key in nothing if key in values and not values[key]}
    begin = {"init_lora_weights": True} if method == "LORA" else {}
    return values | begin | {"peft_type": method, "inference_mode": True}

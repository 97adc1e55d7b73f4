"""Adapters on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from shoestring.data.files import atomic_file
from shoestring.lora.layer import ADAPTER, LoraLinear, attach, is_plain
from shoestring.lora.targets import shortest_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options of PEFT's that change what an adapter computes; a value other than these is refused.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}


def save_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Writes the model's adapter, as PEFT does, into ``directory``, which is made where it does not exist.

    Each of the two files replaces a former one only once it is complete and on disk.

    Raises:
        ValueError: no layer has an adapter.
        OSError: the directory cannot be written.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    if not layers:
        raise ValueError("lora.save_adapter: model: expected one with adapters, received one without")
    tensors = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A[ADAPTER].detach().contiguous().cpu()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B[ADAPTER].detach().contiguous().cpu()
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, to_safetensors(tensors, metadata={"format": "pt"}))
    text = json.dumps(_describe(model, layers), indent=2, sort_keys=True)
    _replace(folder / CONFIG, (text + "\n").encode())


def _describe(model: nn.Module, layers: dict[str, LoraLinear]) -> dict[str, Any]:
    first = next(iter(layers.values()))
    config = getattr(model, "config", None)
    causal = type(model).__name__.endswith("ForCausalLM")
    # Layers that differ from the first are named one by one, each by a pattern that matches nothing else.
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": shortest_names(model, layers),
        "rank_pattern": {f"^{name}": m.rank for name, m in layers.items() if m.rank != first.rank},
        "alpha_pattern": {f"^{name}": m.alpha for name, m in layers.items() if m.alpha != first.alpha},
        "use_rslora": first.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_bias": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _replace(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


def load_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> nn.Module:
    """Puts a LoRA adapter that PEFT or :func:`save_adapter` wrote onto a model, in place.

    Layers without an adapter take one on; layers that have one get the file's values, rank and scaling, in the tensors
    that they have where the shape is the same. As after :func:`shoestring.lora.apply`, the adapter is trainable and
    everything else is frozen. Nothing is changed unless all of the file fits.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file that is damaged, that needs what is not supported here, or that does not fit the model.
    """
    folder = Path(directory)
    config = _read_config(folder / CONFIG)
    pairs = _read_weights(folder / WEIGHTS)
    modules = dict(model.named_modules())
    for name, (lora_A, lora_B) in pairs.items():
        _check_layer(folder / WEIGHTS, name, modules.get(name), lora_A, lora_B)
    extra = [n for n, m in modules.items() if isinstance(m, LoraLinear) and n not in pairs]
    if extra:
        raise ValueError(
            f"lora.load_adapter: {folder}: expected values for {extra[0]}, which has an adapter; found none"
        )

    model.requires_grad_(False)
    for name, (lora_A, lora_B) in pairs.items():
        layer = modules[name]
        options = {
            "alpha": _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8)),
            "rslora": bool(config.get("use_rslora", False)),
            "dropout": float(config.get("lora_dropout") or 0.0),
        }
        if isinstance(layer, LoraLinear) and layer.lora_A[ADAPTER].shape == lora_A.shape:
            for own, new in ((layer.lora_A[ADAPTER], lora_A), (layer.lora_B[ADAPTER], lora_B)):
                own.requires_grad_(True).detach().copy_(new)
            layer.alpha, layer.rslora, layer.dropout = options["alpha"], options["rslora"], options["dropout"]
        else:
            wide = torch.float64 if lora_A.dtype == torch.float64 else torch.float32
            device = layer.weight.device
            attach(layer, lora_A.to(device, wide), lora_B.to(device, wide), **options)
    return model


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"lora.load_adapter: {path}: expected JSON, received something else: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ValueError(f"lora.load_adapter: {path}: peft_type: expected 'LORA', received {kind!r}")
    for option, accepted in PLAIN.items():
        if config.get(option) not in accepted:
            raise ValueError(
                f"lora.load_adapter: {path}: {option}: expected {accepted[-1]!r}, since nothing else is supported "
                f"here, received {config[option]!r}"
            )
    return config


def _read_weights(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    try:
        tensors = parse_safetensors(path.read_bytes())
    except FileNotFoundError:
        raise
    except Exception as error:  # the parser's own class is not exported
        raise ValueError(
            f"lora.load_adapter: {path}: expected a safetensors file, received a damaged one: {error}"
        ) from None
    names: dict[str, None] = {}
    for key in tensors:
        name = key.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")
        if f"{PREFIX}{name}.lora_A.weight" not in tensors or f"{PREFIX}{name}.lora_B.weight" not in tensors:
            raise ValueError(
                f"lora.load_adapter: {path}: expected pairs {PREFIX}<module>.lora_A.weight and .lora_B.weight, "
                f"received {key}"
            )
        names[name] = None
    return {n: (tensors[f"{PREFIX}{n}.lora_A.weight"], tensors[f"{PREFIX}{n}.lora_B.weight"]) for n in names}


def _check_layer(path: Path, name: str, module: nn.Module | None, lora_A: Tensor, lora_B: Tensor) -> None:
    if module is None or not (is_plain(module) or isinstance(module, LoraLinear)):
        found = "none of that name" if module is None else f"a {type(module).__name__}"
        raise ValueError(f"lora.load_adapter: {path}: {name}: expected a linear layer in the model, found {found}")
    assert isinstance(module, nn.Linear)
    rank = lora_A.shape[0] if lora_A.dim() else 0
    expected = ((rank, module.in_features), (module.out_features, rank))
    received = (tuple(lora_A.shape), tuple(lora_B.shape))
    if expected != received:
        raise ValueError(
            f"lora.load_adapter: {path}: {name}: expected lora_A and lora_B of shapes {expected}, received {received}"
        )


def _by_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """PEFT's rule: the first pattern that matches the name, or what it ends with after a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default

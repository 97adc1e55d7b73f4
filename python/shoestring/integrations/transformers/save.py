"""Save quantised language models in the format that transformers uses for bitsandbytes."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.adapters.adapted import AdaptedLayer
from shoestring.files.atomic import CONFIG, MODEL_FILES, atomic_directory, exchange_obstacle, is_partial
from shoestring.files.safetensors_file import save_safetensors
from shoestring.files.write_file import write_text
from shoestring.quantization.fake_quantized_linear_module import FakeQuantizedLinear
from shoestring.quantization.quantized_linear_module import QuantizedLinear
from shoestring.quantization.quantized_tensor import QuantizedTensor

METHOD = "save_quantized"


def save_quantized(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 4 << 30,
    overwrite: bool = False,
) -> None:
    """Write config.json and safetensors files of a quantised model.

    transformers loads the files with bitsandbytes, and ``load_quantized`` loads them without bitsandbytes. If
    the folder holds an old model, the new model replaces it in one step once the new model is on disk. The
    folder therefore contains a complete model at any moment. The files of the old model are deleted; every
    other file in the folder stays.

    Args:
        model: a transformers model with :class:`shoestring.nn.QuantizedLinear` layers, either all 4-bit with
            one quant_type or all int8. Other layers are saved as they are. int4 raises an error, since
            bitsandbytes cannot read it.
        directory: the folder to write. Save the tokenizer's files there after this call.
        max_shard_bytes: maximum size of a weights file in bytes. A tensor that is larger has its own file.
        overwrite: whether to replace the files of an old model one by one if the folder cannot be replaced in
            one step. One step is impossible if the file system cannot exchange folders or has no hard links.
            It is also impossible if the parent folder is not writable, and for a mount point or the current
            directory. A crash while files are replaced one by one leaves a folder without config.json and
            without a complete model.

    Raises:
        ValueError: the model has no quantised layers, quantised layers of several types, or adapters. Or the
            directory is not empty and holds no model, or, without ``overwrite``, cannot be replaced in one
            step.
        OSError: the files cannot be written.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> LlamaForCausalLM(config).save_pretrained("dense")
        >>> model = shoestring.load_quantized("dense")
        >>> shoestring.save_quantized(model, "quantized")
        >>> type(shoestring.load_quantized("quantized").model.layers[0].mlp.up_proj).__name__
        'QuantizedLinear'
    """
    config: Any = copy.deepcopy(model.config)
    config.quantization_config = _quantization_config(model)
    shards = _shards(_distinct(model.state_dict()), max_shard_bytes)
    _check_directory(Path(directory), overwrite)
    with atomic_directory(Path(directory)) as partial:
        config.save_pretrained(partial)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(partial)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            save_safetensors(partial / name, shard, {"format": "pt"})
        if len(shards) > 1:
            _write_index(partial / "model.safetensors.index.json", dict(zip(names, shards, strict=True)))


def _check_directory(directory: Path, overwrite: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"{METHOD}: directory: expected a folder, received a file, {directory}")
    entries, name = os.listdir(directory), Path(os.path.realpath(directory)).name
    other_entries = sorted(entry for entry in entries if not is_partial(entry, name))
    # A crash while files were replaced one by one leaves temporary folders or model files without
    # config.json. A call with overwrite may then be repeated.
    interrupted = len(other_entries) < len(entries) or any(map(MODEL_FILES.fullmatch, other_entries))
    if other_entries and CONFIG not in other_entries and not (overwrite and interrupted):
        raise ValueError(
            f"{METHOD}: directory: expected a new or empty folder, or one that holds a model ({CONFIG}), received "
            f"{directory}, which holds {other_entries[0]} and no {CONFIG}; give another folder"
        )
    obstacle = exchange_obstacle(directory) if other_entries and not overwrite else None
    if obstacle is not None:
        raise ValueError(
            f"{METHOD}: directory: expected a folder that can be replaced in one step, received {directory}: {obstacle};"
            " give another folder, or overwrite=True to replace its files one by one: a crash meanwhile leaves a folder"
            f" without {CONFIG} and without a complete model"
        )


def _quantization_config(model: Any) -> dict[str, Any]:
    """Return quantization_config of config.json for a quantised model; raise ValueError for other layers."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    training = next((n for n, m in linear.items() if isinstance(m, FakeQuantizedLinear)), None)
    if training is not None:
        raise ValueError(
            f"{METHOD}: model: expected QuantizedLinear layers, received {training}, a FakeQuantizedLinear; call "
            "convert_quantized first"
        )
    other = next((n for n, m in linear.items() if type(m) not in (nn.Linear, QuantizedLinear)), None)
    if other is not None:
        raise ValueError(
            f"{METHOD}: model: expected linear layers without adapters, received {other}, a {type(linear[other]).__name__}; "
            "save the adapter with lora.save_adapter, or merge it first"
        )
    layers = [m for m in linear.values() if isinstance(m, QuantizedLinear)]
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    kinds = sorted({weight.quant_type for weight in quantized})
    if len(kinds) != 1:
        raise ValueError(
            f"{METHOD}: model: expected QuantizedLinear layers of one quant_type, received {' and '.join(kinds) or 'none'}"
        )
    if kinds == ["int4"]:
        raise ValueError(
            f"{METHOD}: model: expected nf4, fp4 or int8 layers, received int4, which bitsandbytes does not "
            "have; save the state_dict instead"
        )
    adapted = next((n for n, m in model.named_modules() if isinstance(m, AdaptedLayer)), None)
    if adapted is not None:
        raise ValueError(
            f"{METHOD}: model: expected experts without adapters, received {adapted}; save the adapter with "
            "lora.save_adapter, or merge it first"
        )
    dense = [name for name, m in linear.items() if type(m) is nn.Linear]
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kinds != ["int8"],
        "load_in_8bit": kinds == ["int8"],
        "llm_int8_skip_modules": dense,
    }
    if kinds != ["int8"]:
        weight = quantized[0]
        dtype = (layers[0].compute_dtype if layers else None) or weight.dtype
        config |= {
            "bnb_4bit_quant_type": weight.quant_type,
            "bnb_4bit_use_double_quant": weight.nested is not None,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
        }
    return config


def _distinct(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a state dict for files, with only the first name of tied tensors."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    distinct: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() == 0 or key not in seen:
            distinct[name] = tensor.detach()
        seen.add(key)
    return distinct


def _shards(state: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split tensors into shards of at most ``limit`` bytes, in order."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in state.items():
        if shards[-1] and shard_bytes + tensor.nbytes > limit:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    return shards


def _write_index(path: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    write_text(
        path, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )

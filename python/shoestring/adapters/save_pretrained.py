"""Write an adapter folder, as PEFT does, if ``save_pretrained`` of a model with adapters is called."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.adapters.config_digest import KEY
from shoestring.adapters.files import WEIGHTS, save_adapter
from shoestring.adapters.switch import Member, members
from shoestring.adapters.trained_copy import TrainedCopy
from shoestring.core.save_pretrained import register
from shoestring.files.safetensors_file import open_safetensors, save_safetensors
from shoestring.quantization.quantized_linear_module import QuantizedLinear
from shoestring.quantization.quantized_tensor import QuantizedTensor

METHOD = "save_pretrained"
# Arguments of save_pretrained that would change what is written, and their only supported values.
REQUIRED = {
    "push_to_hub": False,
    "variant": None,
    "save_peft_format": True,
    "distributed_checkpoint": False,
    "safe_serialization": True,
}
# Arguments without a meaning for an adapter, which is one small file.
WITHOUT_MEANING = ("max_shard_size", "save_function", "save_original_format", "token")
# Folders in which the Trainer of transformers saves the state of a run.
TRAINER_CHECKPOINT = re.compile(r"checkpoint-\d+")


def save(model: nn.Module, folder: Path, options: Mapping[str, Any]) -> bool:
    """Write a model with adapters as adapters; return False for a model without.

    A folder ``checkpoint-N``, from which the Trainer of transformers resumes, also gets model.safetensors with
    the tensors that training changes. The Trainer loads them into a model with the same adapters.

    Raises:
        ValueError: an argument cannot be used; weights are split among processes; or the model has no adapters but
            quantised weights, or a folder with an adapter of ours.
    """
    holders = members(model)
    _refuse_split(model, holders, options)
    if not holders:
        _refuse_quantised(model)
        _refuse_beside_adapter(model, folder)
        return False
    _check(holders, options)
    if options.get("is_main_process", True):
        save_adapter(model, folder)
        if TRAINER_CHECKPOINT.fullmatch(folder.name):
            save_safetensors(folder / "model.safetensors", _changed(model, holders), {"format": "pt"})
    return True


def _refuse_split(model: nn.Module, holders: Mapping[str, Member], options: Mapping[str, Any]) -> None:
    """Raise for parameters that are DTensors, unless transformers has split them, or the caller has gathered them."""
    config = getattr(model, "config", None)
    split = getattr(config, "distributed_config", None) or getattr(model, "_tp_size", None)
    if not holders and (split is not None or options.get("state_dict") is not None):
        return
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local") and (not holders or parameter.requires_grad):
            raise ValueError(
                f"{METHOD}: model: expected whole weights, received {name}, which is split among processes. "
                "Call undo() of the report of shoestring.parallelize on all processes first, or pass as state_dict a "
                "full state dict that all processes have gathered, if the model has no adapters"
            )


def _refuse_quantised(model: nn.Module) -> None:
    for name, module in model.named_modules():
        weights = module._parameters.values()
        if isinstance(module, QuantizedLinear) or any(isinstance(w, QuantizedTensor) for w in weights):
            raise ValueError(
                f"{METHOD}: model: expected dense weights, received {name}, a {type(module).__name__}, which from_pretrained "
                "would not read. Call shoestring.save_quantized(model, directory)"
            )


def _refuse_beside_adapter(model: nn.Module, folder: Path) -> None:
    """Raise for a folder with an adapter of ours, such as one that is merged by now.

    from_pretrained would add the adapter to the model once more.
    """
    adapter = folder / WEIGHTS
    if getattr(model, "_hf_peft_config_loaded", False) or not adapter.is_file():
        return
    if KEY in open_safetensors(adapter, f"{METHOD}: {adapter}: expected a safetensors file").metadata():
        raise ValueError(
            f"{METHOD}: save_directory: expected a folder without an adapter, received {folder}, which holds {WEIGHTS}: "
            "from_pretrained would add it to the model. Remove it, or choose another folder"
        )


def _check(holders: Mapping[str, Member], options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of save_pretrained that a model with adapters does not support."""
    for name, value in options.items():
        if name in REQUIRED and value != REQUIRED[name]:
            raise ValueError(
                f"{METHOD}: {name}: expected {REQUIRED[name]} for a model with adapters, received {value!r}. Call "
                "shoestring.lora.save_adapter, or merge the adapters first"
            )
        if name not in (*REQUIRED, *WITHOUT_MEANING, "is_main_process", "state_dict"):
            raise ValueError(
                f"{METHOD}: {name}: expected no such argument for a model with adapters, received {value!r}. Call "
                "shoestring.lora.save_adapter, or merge the adapters first"
            )
    state = options.get("state_dict")
    tensors = [t for m in holders.values() for name in m.adapters for t in m.tensors(name).values()]
    if state is not None and not {t.data_ptr() for t in tensors} <= {t.data_ptr() for t in state.values()}:
        raise ValueError(
            f"{METHOD}: state_dict: expected None or the tensors of the model, which has adapters, received others. Load "
            "them into the model first"
        )


def _changed(model: nn.Module, holders: Mapping[str, Member]) -> dict[str, Tensor]:
    """Return the entries of the model's state_dict without frozen weights that are those of the base."""
    adapters = tuple(
        f"{name}.modules_to_save." if isinstance(member, TrainedCopy) else f"{name}." if name else ""
        for name, member in holders.items()
    )
    entries: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        prefix, state = f"{name}." if name else "", dict[str, Any]()
        module._save_to_state_dict(state, prefix, False)
        # The initialisation of an adapter (PiSSA, OLoRA, LoftQ) may have changed the weight of the base.
        whole = (name not in holders and prefix.startswith(adapters)) or hasattr(module, "initial_A")
        for key, value in state.items():
            parameter = module._parameters.get(key.removeprefix(prefix))
            trained = parameter is not None and parameter.requires_grad
            if whole or trained or key.removeprefix(prefix) in module._buffers:
                entries[key] = value
    return entries


register(save)

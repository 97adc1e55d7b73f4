"""Add LoRA adapters with shoestring or, for `--baseline`, with PEFT and bitsandbytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.adapters.experts import LoraExperts
from shoestring.adapters.targets import is_conv1d, is_linear, refuse_unmatched_targets
from shoestring.core.errors import InputError
from shoestring.core.stacks import stacks_of
from shoestring.training.config import FinetuneConfig


def apply_lora(model: nn.Module, config: FinetuneConfig) -> Any:
    """Freeze ``model`` and add LoRA adapters to it.

    shoestring and PEFT draw the same random numbers, so the same seed gives the same initial adapters with
    either.
    """
    model.requires_grad_(False)
    torch.manual_seed(config.seed)
    try:
        if config.baseline:
            return _plain(model, config)
        from shoestring import lora

        return lora.apply(
            model, rank=config.rank, alpha=config.alpha, target_modules=config.targets,
            target_parameters=config.parameter_targets, quantize=config.frozen_format, double_quant=config.double_quant,
        )  # fmt: skip
    except ValueError as error:  # raised if a name matches no module, or the rank does not fit
        parameters = f", --target-parameters {config.target_parameters}" if config.parameter_targets else ""
        raise InputError(
            f"--target-modules {config.targets}{parameters}, --rank {config.rank}: {error}"
        ) from None


def expert_lines(model: nn.Module) -> list[str]:
    """Return a line that says how many experts of a model are quantised, and how many have adapters; none without experts."""
    from shoestring.quantization.quantized_stacks import count_experts

    count = count_experts(model)
    total = count.quantized + count.dense
    if total == 0:
        return []
    layers = [dict(stacks_of(m)) for m in model.modules() if isinstance(m, LoraExperts)]
    adapted = sum(next(iter(stacks.values())).shape[0] for stacks in layers if stacks)
    return [f"experts: {total}, of which {count.quantized} are quantised and {adapted} have adapters"]


def trained_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the trained parameters of a model to ``dtype``."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _plain(model: nn.Module, config: FinetuneConfig) -> nn.Module:
    """Add adapters with PEFT, for the run in plain PyTorch."""
    # hide a message in which bitsandbytes recommends an optional package
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError(
            "--baseline: fine-tuning with plain PyTorch needs PEFT; install it with `pip install peft`"
        ) from None
    targets = config.targets
    if isinstance(targets, list):  # PEFT ignores names that match no module
        refuse_unmatched_targets(model, targets, is_linear)
    if config.frozen_format == "nf4":
        quantize_with_bitsandbytes(model, config.double_quant)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        target_modules=targets,
        target_parameters=config.parameter_targets or None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def quantize_with_bitsandbytes(model: Any, double_quant: bool = False) -> None:
    """Replace each linear layer except the output layer by ``bitsandbytes.nn.Linear4bit``.

    Layers are replaced one by one, so that only one layer at a time is in memory both dense and quantised.
    """
    try:
        from bitsandbytes.nn.modules import Linear4bit, Params4bit
    except ImportError:
        raise InputError(
            "--baseline --quantize nf4: needs bitsandbytes; install it with `pip install bitsandbytes`"
        ) from None
    transposed = next((name for name, layer in model.named_modules() if is_conv1d(layer)), None)
    if transposed is not None:
        raise InputError(
            f"--quantize nf4: expected none for a model with Conv1D layers, such as {transposed}, which cannot be quantised"
        )
    head = model.get_output_embeddings()
    device = next(model.parameters()).device
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer is not head
    ]
    for name, layer in layers:
        packed = Linear4bit(
            layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=layer.weight.dtype,
            compress_statistics=double_quant, quant_type="nf4", device="meta",
        )  # fmt: skip
        packed.weight = Params4bit(  # type: ignore[misc]  # the overloads of `to` expect another class
            layer.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=double_quant,
            module=packed,
        ).to(device)  # bitsandbytes quantises the weight when `.to` moves the layer
        packed.bias = layer.bias
        # In eval mode, Linear4bit repacks its weight permanently on CPUs with AVX512-BF16. Training continues
        # after a validation, so disable the repacking.
        packed.support_avx512bf16_for_cpu = False
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
        layer.weight = None  # type: ignore[assignment]  # frees the dense weight
    model.is_loaded_in_4bit = True  # PEFT uses its 4-bit LoRA layer only if the model has this attribute


def save_adapter(model: Any, folder: Path, baseline: bool) -> None:
    """Write the LoRA adapter of a model to ``folder`` in PEFT's format."""
    if baseline:
        model.save_pretrained(str(folder))
        (folder / "README.md").unlink(missing_ok=True)  # remove the empty model card that PEFT writes
        return
    from shoestring import lora

    lora.save_adapter(model, folder)


def merge_adapter(base: nn.Module, adapter: Path, baseline: bool) -> Any:
    """Merge a saved LoRA adapter into a model with dense weights; return the model."""
    if baseline:
        from peft import PeftModel

        return PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    from shoestring import lora

    lora.load_adapter(base, adapter)
    lora.merge(base, reversible=False)
    return base

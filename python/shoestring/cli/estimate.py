"""`shoestring estimate`: print the memory and traffic of one training step, without building the model."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.cli.console import gigabytes, print_table
from shoestring.core.errors import InputError
from shoestring.core.remote_code import why_not_loaded
from shoestring.data.tokenizer import quiet_transformers
from shoestring.files.read_file import read_json
from shoestring.training.config import DENSE, PRESETS, check_double_quant, default_format
from shoestring.training.conflicts import check_step, optimizer_conflicts
from shoestring.training.estimate.config import EstimateConfig, RanksConfig
from shoestring.training.estimate.ranks import Choice, check_ranks, choose
from shoestring.training.estimate.step import Estimate, estimate
from shoestring.training.memory import kept_bytes, parse_budget
from shoestring.training.options import refuse_together
from shoestring.training.run.device import (
    base_dtype,
    check_precision,
    find_device,
    parse_device,
    weight_dtype,
)
from shoestring.training.run.models import build_preset, locate_model
from shoestring.training.run.positions import check_positions
from shoestring.training.run.weights import check_weights_place

# In the JSON, these options describe the model. All other options describe the step.
MODEL_OPTIONS = (
    "model", "vocab_size", "experts", "top_k", "full", "rank", "quantize", "double_quant", "target_modules", "target_parameters",
    "trust_remote_code",
)  # fmt: skip

AUTO = (
    "--precision auto: training measures which precision it takes; these are the bytes of fp32, give --precision bf16 for "
    "those of bf16"
)

RANK_OPTIONS = {each.name for each in fields(RanksConfig)} - {"memory"}


def check(config: EstimateConfig) -> None:
    """Raise InputError for the first option with a value that no training run can have."""
    check_precision(config.precision, config.weights, torch.device(config.device))
    check_step(config)
    if config.memory_budget is not None and config.activations == "recompute":
        raise InputError("--memory-budget: expected no --activations recompute beside it, got both")
    check_weights_place(config, torch.device(config.device))
    refuse_together(optimizer_conflicts(config))
    check_ranks(config)


def build(config: EstimateConfig) -> nn.Module:
    """Build the model on the meta device."""
    quiet_transformers()
    dtype = weight_dtype(config.weights) if config.rank is None else base_dtype(config.autocast)
    with torch.device("meta"):
        if config.model in PRESETS:
            model: nn.Module = build_preset(
                PRESETS[config.model],
                config.vocab_size,
                config.seq_len,
                0,
                experts=config.experts,
                top_k=config.experts_of_token(),
                dtype=dtype,
            )
            return model
        return _from_config(config, dtype)


def adapt(model: nn.Module, config: EstimateConfig) -> nn.Module:
    """Add LoRA adapters to the model if a rank is given."""
    if config.rank is None:
        return model
    from shoestring import lora

    model.requires_grad_(False)
    try:
        return lora.apply(
            model, rank=config.rank, target_modules=config.targets, target_parameters=config.parameter_targets,
            quantize=None if config.quantize == "none" else config.quantize, double_quant=config.double_quant,
        )  # fmt: skip
    except ValueError as error:  # raised if a name matches no module, or the rank does not fit
        targets = config.targets if isinstance(config.targets, str) else ",".join(config.targets)
        raise InputError(f"--target-modules {targets}, --rank {config.rank}: {error}") from None


def _from_config(options: EstimateConfig, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trust_remote_code = Path(options.model), options.trust_remote_code
    if not path.is_file():
        try:
            path = locate_model(options.model, trust_remote_code, weights=False)
        except InputError as error:
            raise InputError(f"{error}; presets are {', '.join(PRESETS)}") from None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"--model {path}: expected a directory with a config.json, or such a file")
    try:
        fields = read_json(file, str(file))
        check_positions(file.parent, fields if isinstance(fields, dict) else {}, options.seq_len)
        # a model's own Python code lies in the folder of its config.json
        folder = file.parent if file.name == "config.json" else file
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        result: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
        return result
    except InputError:
        raise
    except Exception as error:  # loading a broken configuration may raise any exception
        reason = why_not_loaded(error)
        raise InputError(
            f"--model {path}: {file.name} does not describe a causal language model ({reason})"
        ) from None


def run(config: EstimateConfig, as_json: bool) -> None:
    """Print the estimate as a table or as JSON."""
    device = find_device("auto") if config.device == "auto" else parse_device(config.device)
    by_default = config.quantize is None
    config = replace(config.filled(), device=device.type)
    check(config)
    if config.precision == "auto":
        config = replace(config, precision="fp32")
        if not as_json:
            print(AUTO)
    model = build(config)
    if by_default and config.rank is not None:
        fields: Any = model.config
        config = replace(config, quantize=default_format(fields.model_type))
        if config.quantize == "none":
            check_double_quant(config.double_quant, None)
            if not as_json:
                print(DENSE)
    model = adapt(model, config)
    if config.world is None:
        estimated = estimate(model, config)
        if as_json:
            print(json.dumps(report(estimated, config), indent=1))
        else:
            show(estimated, config)
            if config.memory is not None:
                print(fit(estimated, config)[1])
        return
    choice = choose(model, config)
    if as_json:
        print(json.dumps(report(choice.chosen.estimate, config) | ranks_report(choice), indent=1))
    else:
        show_ranks(choice, config)


def report(estimated: Estimate, config: EstimateConfig) -> dict[str, Any]:
    """Return the estimate and its options as JSON values, all sizes in bytes."""
    options = asdict(config)
    if config.world is None:
        options = {name: options[name] for name in options if name not in RANK_OPTIONS}
    model = {name: options.pop(name) for name in MODEL_OPTIONS}
    fits = {} if config.memory is None or config.world is not None else {"fits": fit(estimated, config)[0]}
    return {
        "model": model | {"target_modules": config.targets},
        "options": options
        | {"offload": config.place, "memory_budget": parse_budget(config.memory_budget)}
        | {"offload_weights": config.weights_place, "keep": kept_bytes(config.keep)},
        "parameters": estimated.parameters,
        "trained": estimated.trained,
        "memory": {place: [asdict(item) for item in items] for place, items in estimated.memory.items()},
        "totals": estimated.totals(),
        "traffic": estimated.traffic,
        **fits,
    }


def fit(estimated: Estimate, config: EstimateConfig) -> tuple[bool, str]:
    """Return whether the memory of the device is at most --memory as far as it is known, and a sentence on it."""
    size, limit = estimated.totals()["device"], parse_budget(config.memory, "memory") or 0
    is_known = all(item.bytes is not None for item in estimated.memory["device"])
    needs = f"{size:,}" if is_known else f"{size:,} and what is not known"
    if size <= limit:
        return True, f"fits: {needs} of the {limit:,} bytes of --memory"
    return False, f"does not fit: {needs} bytes, more than the {limit:,} of --memory"


def show(estimated: Estimate, config: EstimateConfig) -> None:
    """Print tables with the bytes of each item, in total and per trained parameter."""

    def row(name: str, size: int | None, note: str = "") -> list[str]:
        if size is None:
            return [f"  {name}", "?", "", note]
        return [f"  {name}", gigabytes(size), f"{size / max(estimated.trained, 1):.3f}", note]

    rows = [["", "bytes", "a trained parameter", ""]]
    for place, items in estimated.memory.items():
        if items:
            rows += [[f"{place}, {gigabytes(estimated.totals()[place])}", "", "", ""]]
            rows += [row(item.name, item.bytes, item.note) for item in items]
    rows += [["each step moves", "" if estimated.traffic else "nothing", "", ""]]
    rows += [row(name, size) for name, size in estimated.traffic.items()]
    print(f"{estimated.parameters / 1e6:,.1f} M parameters, {estimated.trained / 1e6:,.1f} M of them trained")
    print_table(rows, texts=(0, 3))
    if config.device == "cpu":
        print("device and host are the same memory")


def ranks_report(choice: Choice) -> dict[str, Any]:
    """Return the strategies that were compared as JSON values, sizes in bytes and times in seconds."""
    names = ("strategy", "bytes", "sent", "seconds", "link_seconds")
    return {
        "chosen": choice.chosen.strategy,
        "compared": [{name: getattr(plan, name) for name in names} for plan in choice.compared],
        "reasons": choice.reasons,
    }


def show_ranks(choice: Choice, config: EstimateConfig) -> None:
    """Print the memory of a rank, the bytes it sends, and the seconds of a step if they have a basis."""
    chosen = choice.chosen
    print(f"{chosen.strategy} over {config.world} processes; memory and traffic of one of them:")
    show(chosen.estimate, config)
    rows = [["", "bytes", "sent in a step", "s on the link", "s a step"]]
    for plan in choice.compared:
        times = ["?" if time is None else f"{time:.4g}" for time in (plan.link_seconds, plan.seconds)]
        rows.append([plan.strategy, gigabytes(plan.bytes), gigabytes(plan.sent), *times])
    print_table(rows, texts=(0,))
    for reason in choice.reasons:
        print(reason)
    if config.link is not None:
        print(
            "Times are formulas of --link and --step-seconds, without the work of codecs and the few numbers that processes "
            "compare."
        )

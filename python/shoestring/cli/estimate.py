"""`shoestring estimate`: print the memory and traffic of one training step, without building the model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.checkpoint.model import parse_bytes
from shoestring.cli.console import gigabytes, print_table
from shoestring.core.errors import InputError
from shoestring.data.tokenizer import quiet_transformers
from shoestring.integrations.transformers.remote_code import why_not_loaded
from shoestring.optim.offload import PLACES, is_place
from shoestring.training.config import ESTIMATE_DTYPES, PRESETS
from shoestring.training.estimate import Estimate, Options, estimate
from shoestring.training.models import build_llama

DTYPES = dict(zip(ESTIMATE_DTYPES, (torch.float32, torch.bfloat16, torch.float16)))


@dataclass(frozen=True)
class Request:
    """The options of the command that are not part of ``Options``, as given on the command line."""

    model: str
    vocab_size: int
    dtype: str
    rank: int | None
    quantize: str
    target_modules: str | list[str]
    trust_remote_code: bool = False


def options_of(values: dict[str, Any], dtype: str, offload: str, memory_budget: str | None) -> Options:
    """Check the options and return them; raise InputError for the first one that no run can have."""

    def expect(good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise InputError(f"--{name}: expected {expected}, got {received}")

    expect(
        dtype != "fp16" or values["weights"] == "plain",
        "weights",
        "plain with --dtype fp16",
        values["weights"],
    )
    place = None if offload == "none" else offload
    expect(is_place(place), "offload", PLACES, offload)
    budget = None
    if memory_budget is not None:
        checkpointing = values["gradient_checkpointing"]
        expect(
            not checkpointing,
            "memory-budget",
            "it without --gradient-checkpointing; leave one of them out",
            "both",
        )
        try:
            budget = parse_bytes(memory_budget)
        except ValueError as error:
            raise InputError(f"--memory-budget: {error}") from None
    return Options(offload=place, activation_bytes=DTYPES[dtype].itemsize, memory_budget=budget, **values)


def load(request: Request, seq_len: int) -> nn.Module:
    """Build the model on the meta device, with LoRA adapters if a rank is given."""
    quiet_transformers()
    model: nn.Module
    with torch.device("meta"):
        if request.model in PRESETS:
            model = build_llama(PRESETS[request.model], request.vocab_size, seq_len, 0).to(
                DTYPES[request.dtype]
            )
        else:
            model = _from_config(Path(request.model), DTYPES[request.dtype], request.trust_remote_code)
    if request.rank is None:
        if request.quantize != "none":
            raise InputError(
                f"--quantize {request.quantize}: expected with --rank: trained weights stay as they are"
            )
        return model
    from shoestring import lora

    model.requires_grad_(False)
    try:
        return lora.apply(
            model, rank=request.rank, target_modules=request.target_modules,
            quantize=None if request.quantize == "none" else request.quantize,
        )  # fmt: skip
    except ValueError as error:  # a module name that matches nothing, or a rank that does not fit
        targets = (
            request.target_modules
            if isinstance(request.target_modules, str)
            else ",".join(request.target_modules)
        )
        raise InputError(f"--target-modules {targets}, --rank {request.rank}: {error}") from None


def _from_config(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        presets = ", ".join(PRESETS)
        raise InputError(
            f"--model {path}: expected a directory with a config.json, such a file, or one of {presets}"
        )
    try:
        # the code of a model is in the folder of config.json
        folder = file.parent if file.name == "config.json" else file
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        result: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
        return result
    except Exception as error:  # a broken configuration may raise any exception
        reason = why_not_loaded(error)
        raise InputError(
            f"--model {path}: {file.name} does not describe a causal language model ({reason})"
        ) from None


def run(request: Request, options: Options, as_json: bool) -> None:
    """Print the estimate as a table or as JSON."""
    found = estimate(load(request, options.seq_len), options)
    if as_json:
        memory = {place: [asdict(item) for item in items] for place, items in found.memory.items()}
        print(json.dumps({
            "model": asdict(request), "options": asdict(options), "parameters": found.parameters,
            "trained": found.trained, "memory": memory, "totals": found.totals(), "traffic": found.traffic,
        }, indent=1))  # fmt: skip
    else:
        show(found, options)


def show(found: Estimate, options: Options) -> None:
    """Print tables with the bytes of each item, in total and per trained parameter."""

    def row(name: str, size: int | None, note: str = "") -> list[str]:
        if size is None:
            return [f"  {name}", "?", "", note]
        return [f"  {name}", gigabytes(size), f"{size / max(found.trained, 1):.3f}", note]

    rows = [["", "bytes", "a trained parameter", ""]]
    for place, items in found.memory.items():
        if items:
            rows += [[f"{place}, {gigabytes(found.totals()[place])}", "", "", ""]]
            rows += [row(item.name, item.bytes, item.note) for item in items]
    rows += [["each step moves", "" if found.traffic else "nothing", "", ""]]
    rows += [row(name, size) for name, size in found.traffic.items()]
    print(f"{found.parameters / 1e6:,.1f} M parameters, {found.trained / 1e6:,.1f} M of them trained")
    print_table(rows, texts=(0, 3))
    if options.device == "cpu":
        print("device and host are the same memory")

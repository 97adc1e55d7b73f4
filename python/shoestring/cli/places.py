"""Choose where the frozen weights of a fine-tuning lie, before the model is loaded, so that it fits a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shoestring.cli import estimate as estimation
from shoestring.core.device import is_asynchronous
from shoestring.core.process_memory import resident_bytes
from shoestring.training.config import FinetuneConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import estimate
from shoestring.training.run.plan import budget_of

# Options of fine-tuning that decide the memory of a step.
SHARED = (
    "seq_len", "weights", "optimizer", "optimizer_state", "optimizer_arg", "step_in_backward", "workspace_mb", "rank",
    "quantize", "double_quant", "target_modules", "keep", "trust_remote_code",
)  # fmt: skip


def choose_place(config: FinetuneConfig, folder: str, device: torch.device) -> FinetuneConfig:
    """Return the options with which the model of ``folder`` fits ``--device-memory`` when it is loaded.

    A step has at least the weights, the adapters, and a micro-batch of one row of which all blocks are computed again.
    If these do not fit, frozen weights take 16 bits, or leave for ``--disk``, or from a GPU for host memory. Options
    that the user gave stay. If nothing fits, the options stay, and the plan says later what is missing.
    """
    budget = budget_of(config, device)
    if budget is None or config.full:
        return config
    for choice in _choices(config, device):
        needed = _least_bytes(choice, folder, device)
        used = 0 if is_asynchronous(device) else resident_bytes()
        if used + needed <= budget:
            return choice
    return config


def _choices(config: FinetuneConfig, device: torch.device) -> Iterator[FinetuneConfig]:
    """Yield the options with each place and precision that may be chosen, the fastest first."""
    places = [config.offload_weights]
    if "offload_weights" not in config.given:
        places += ["cpu"] if is_asynchronous(device) and config.host_memory is not None else []
        places += [] if config.disk is None else [f"nvme:{config.disk.rpartition('=')[0] or config.disk}"]
    for place in places:
        chosen = replace(config, offload_weights=place)
        yield chosen
        if config.precision == "auto":
            yield replace(chosen, precision="bf16")


def _least_bytes(config: FinetuneConfig, folder: str, device: torch.device) -> int:
    """Return the bytes that a step needs at least on the device; on a CPU, also in host memory."""
    options = EstimateConfig(
        model=folder,
        device=device.type,
        batch_size=1,
        accumulate=1,
        activations="recompute",
        precision="fp32" if config.precision == "auto" else config.precision,
        offload_weights=config.offload_weights,
        **{name: getattr(config, name) for name in SHARED},
    )
    totals = estimate(estimation.adapt(estimation.build(options), options), options).totals()
    on_host = 0 if is_asynchronous(device) else totals.get("host", 0)
    return totals["device"] + on_host

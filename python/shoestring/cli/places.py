"""Choose where the frozen weights of a fine-tuning lie, before the model is loaded, so that it fits a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from shoestring.cli import estimate as estimation
from shoestring.core.device import is_asynchronous
from shoestring.core.errors import InputError
from shoestring.core.process_memory import resident_bytes
from shoestring.planning.tiles import plan_tiles
from shoestring.planning.training_plan import TrainingPlan
from shoestring.training.config import FinetuneConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import Estimate, estimate
from shoestring.training.estimate.weights import IN_FLIGHT
from shoestring.training.run.plan import budget_of

# Options of fine-tuning that decide the memory of a step.
SHARED = (
    "seq_len", "weights", "optimizer", "optimizer_state", "optimizer_arg", "step_in_backward", "workspace_mb", "rank",
    "quantize", "double_quant", "target_modules", "target_parameters", "keep", "trust_remote_code",
)  # fmt: skip


Tiles = dict[str, int]


def choose_place(
    config: FinetuneConfig, folder: str, device: torch.device, former: TrainingPlan | None = None
) -> tuple[FinetuneConfig, Tiles]:
    """Return the options with which the model of ``folder`` fits ``--device-memory`` when it is loaded, and its tiles.

    A step has at least the weights, the adapters, and a micro-batch of one row of which all blocks are computed again.
    If these do not fit, frozen weights take 16 bits, or leave for ``--disk``, or from a GPU for host memory. If two
    blocks at a time do not fit either, quantised layers without adapters leave in tiles, as they are read. Options that
    the user gave stay, and several processes keep the weights on the device. If nothing fits, the options stay, and the
    plan says later what is missing. A run that goes on with its ``former`` plan has the tiles of this plan.
    """
    if former is not None and former.tiles:
        place = config.offload_weights if "offload_weights" in config.given else former.weights_place
        return replace(config, offload_weights=place), dict(former.tiles)
    budget = budget_of(config, device)
    if budget is None or config.full:
        return config, {}
    tiled = None
    for choice in _choices(config, device):
        model, found = _least(choice, folder, device)
        spare = budget - (0 if is_asynchronous(device) else resident_bytes()) - _bytes(found, device)
        if spare >= 0:
            return choice, {}
        can_tile = former is None and choice.blocks_place is not None and choice.frozen_format is not None
        if tiled is None and can_tile:
            arriving = sum(item.bytes or 0 for item in found.memory["device"] if item.name == IN_FLIGHT)
            with suppress(InputError):  # no tiles fit
                tiled = choice, plan_tiles(model, max(1, spare + arriving))
    return tiled or (config, {})


def _choices(config: FinetuneConfig, device: torch.device) -> Iterator[FinetuneConfig]:
    """Yield the options with each place and precision that may be chosen, the fastest first."""
    places = [config.offload_weights]
    if "offload_weights" not in config.given and config.processes == 1:
        places += ["cpu"] if is_asynchronous(device) and config.host_memory is not None else []
        places += [] if config.disk is None else [f"nvme:{config.disk.rpartition('=')[0] or config.disk}"]
    for place in places:
        chosen = replace(config, offload_weights=place)
        yield chosen
        if config.precision == "auto":
            yield replace(chosen, precision="bf16")


def _least(config: FinetuneConfig, folder: str, device: torch.device) -> tuple[nn.Module, Estimate]:
    """Return the model on the meta device, and the estimate of the step with the least memory."""
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
    model = estimation.adapt(estimation.build(options), options)
    return model, estimate(model, options)


def _bytes(found: Estimate, device: torch.device) -> int:
    """Return the bytes of an estimate on the device; on a CPU, also in host memory."""
    totals = found.totals()
    return totals["device"] + (0 if is_asynchronous(device) else totals.get("host", 0))

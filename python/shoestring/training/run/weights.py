"""Let the weights of a model's blocks leave the device in a run, for the options --offload-weights and --keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoestring.checkpoint.model import parse_bytes
from shoestring.checkpoint.weights import OWNER, OffloadedWeights, is_place, offload_weights
from shoestring.core.errors import InputError
from shoestring.core.presence import weights_present
from shoestring.training.config import FinetuneConfig, StepConfig, WeightsConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.run.processes import world_size

PLACES = "none | cpu | nvme:DIR"  # values of --offload-weights, for messages


def place_of_weights(config: StepConfig) -> str | None:
    """Return the value of --offload-weights; None without it, also for commands that do not have it."""
    return config.weights_place if isinstance(config, WeightsConfig) else None


def blocks_place(config: FinetuneConfig) -> str | None:
    """Return where whole weights of blocks lie; None if they stay, or if several processes move their parts."""
    return None if config.parallel != "none" and world_size() > 1 else config.weights_place


def kept_bytes(config: WeightsConfig) -> int:
    """Return the value of --keep in bytes; raise InputError if it is no size."""
    try:
        return 0 if config.keep.strip() == "0" else parse_bytes(config.keep)
    except ValueError as error:
        raise InputError(f"--keep: {error}") from None


def check_weights_place(config: FinetuneConfig | EstimateConfig, device: torch.device) -> None:
    """Raise InputError if --offload-weights and --keep do not fit the other options; reads and writes no file."""
    place, option = config.weights_place, f"--offload-weights {config.offload_weights}"
    kept = kept_bytes(config)
    if place is None:
        if kept:
            raise InputError(f"--keep {config.keep}: expected --offload-weights as well, got none; add it")
        return
    if not is_place(place):
        raise InputError(f"--offload-weights: expected {PLACES}, got {place}")
    if place == "cpu" and device.type == "cpu":
        raise InputError(
            f"{option}: expected nvme:DIR with --device cpu, whose weights are in host memory already, got cpu"
        )
    if not trained_leave(config):
        return
    full = "--full" if isinstance(config, FinetuneConfig) else "no --rank"
    if not config.step_in_backward:
        raise InputError(
            f"{option}: expected --step-in-backward with {full}, since a trained weight is stepped while its block "
            "is on the device; got none, add it"
        )
    if config.offload == "cpu":
        raise InputError(
            f"{option}: expected --offload none, stream or nvme:DIR with {full}, got --offload cpu, which steps weights "
            "after backward of their block"
        )
    if isinstance(config, FinetuneConfig) and config.compile:
        raise InputError(
            f"{option}: expected no --compile with {full}, since the last bits of results would be others than without "
            f"{option}; leave one of them out"
        )
    if config.optimizer == "schedule-free-adamw":
        raise InputError(
            f"{option}: expected no --optimizer schedule-free-adamw with {full}, since it changes all weights "
            "at once for each evaluation; take another optimizer"
        )


def trained_leave(config: StepConfig) -> bool:
    """Return whether trained weights are among those that --offload-weights moves."""
    if isinstance(config, FinetuneConfig):
        return config.full and blocks_place(config) is not None
    alone = isinstance(config, EstimateConfig) and config.world is None and config.rank is None
    return alone and place_of_weights(config) is not None


def check_weights_folder(config: FinetuneConfig) -> None:
    """Raise InputError if no file can be made in the folder of --offload-weights; leaves no file there."""
    if config.weights_place not in (None, "cpu"):
        with weights_errors(config.weights_place):
            folder = str(config.weights_place).partition(":")[2]
            torch.classes.shoestring.WeightStore(torch.device("cpu"), folder, 0, False)


@contextmanager
def weights_errors(place: str | None, then: Callable[[], str] = str) -> Iterator[None]:
    """Turn an error of moved weights (no folder, no space, a faulty disk) into an InputError of one line.

    Args:
        place: the value of --offload-weights; with None, no error is changed.
        then: returns the end of the message.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if place is None or not reason.startswith("offload_weights: "):
            raise
        raise InputError(
            f"--offload-weights {place}: {reason.removeprefix('offload_weights: ')}{then()}"
        ) from None


def let_weights_leave(
    model: nn.Module, config: StepConfig, optimizers: list[torch.optim.Optimizer]
) -> OffloadedWeights | None:
    """Let the weights of the model's blocks leave as --offload-weights says, unless loading has done so already.

    Call it when the adapters are in the model, and the optimizers and the weights have their state of a
    checkpoint: what reads or changes all weights at once has to come before.

    Returns:
        The offloaded weights, or None without the option.
    """
    if not isinstance(config, FinetuneConfig) or blocks_place(config) is None:
        return None
    if hasattr(model, OWNER):
        return OffloadedWeights.of(model)
    optimizer = optimizers[0] if trained_leave(config) else None
    with weights_errors(config.weights_place):
        return offload_weights(model, str(config.weights_place), keep=kept_bytes(config), optimizer=optimizer)


def copies_in_host_memory(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of parameters of a model, given by name, of which some may be away from the device."""
    found = {}
    for name, tensor in tensors.items():
        with weights_present(model.get_submodule(name.rpartition(".")[0])):
            found[name] = tensor.to("cpu", copy=True)
    return found

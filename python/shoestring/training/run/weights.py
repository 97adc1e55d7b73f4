"""Let the weights of a model's blocks leave the device in a run, for the options --offload-weights and --keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoestring.checkpoint.weights import OWNER, OffloadedWeights, is_place, offload_weights
from shoestring.core.errors import InputError
from shoestring.core.presence import weights_present
from shoestring.training.config import FinetuneConfig, LoopConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.memory import kept_bytes

PLACES = "none | cpu | nvme:DIR"  # values of --offload-weights, for messages


def check_weights_place(config: FinetuneConfig | EstimateConfig, device: torch.device) -> None:
    """Raise InputError if --offload-weights and --keep do not fit the other options; reads and writes no file."""
    place, option = config.weights_place, f"--offload-weights {config.offload_weights}"
    kept_on_device = kept_bytes(config.keep)
    if place is None:
        if kept_on_device:
            raise InputError(f"--keep {config.keep}: expected --offload-weights as well, got none; add it")
        return
    if not is_place(place):
        raise InputError(f"--offload-weights: expected {PLACES}, got {place}")
    if place == "cpu" and device.type == "cpu":
        raise InputError(
            f"{option}: expected nvme:DIR with --device cpu, whose weights are in host memory already, got cpu"
        )
    if not config.trained_leave:
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


def check_weights_folder(place: str | None) -> None:
    """Raise InputError if no file can be made in the folder of --offload-weights; leaves no file there."""
    if place is not None and place != "cpu":
        with weights_errors(place):
            folder = place.partition(":")[2]
            torch.classes.shoestring.WeightStore(torch.device("cpu"), folder, 0, False)


@contextmanager
def weights_errors(place: str | None, message_end: Callable[[], str] = str) -> Iterator[None]:
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
            f"--offload-weights {place}: {reason.removeprefix('offload_weights: ')}{message_end()}"
        ) from None


def let_weights_leave(
    model: nn.Module, config: LoopConfig, optimizers: list[torch.optim.Optimizer]
) -> OffloadedWeights | None:
    """Let the weights of the model's blocks leave as --offload-weights says, unless loading has done so already.

    Call it when the adapters are in the model, and the optimizers and the weights have their state of a
    checkpoint: what reads or changes all weights at once has to come before.

    Returns:
        The offloaded weights, or None without the option.
    """
    if not isinstance(config, FinetuneConfig) or config.blocks_place is None:
        return None
    if hasattr(model, OWNER):
        return OffloadedWeights.of(model)
    optimizer = optimizers[0] if config.trained_leave else None
    with weights_errors(config.blocks_place):
        return offload_weights(model, config.blocks_place, keep=kept_bytes(config.keep), optimizer=optimizer)


def copies_in_host_memory(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of parameters of a model, given by name, of which some may be away from the device."""
    copies = {}
    for name, tensor in tensors.items():
        with weights_present(model.get_submodule(name.rpartition(".")[0])):
            copies[name] = tensor.to("cpu", copy=True)
    return copies

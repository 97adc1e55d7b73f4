"""Checks of options that several commands share, and pairs of options that cannot be combined."""

from __future__ import annotations

from collections.abc import Iterator

from shoestring.core.errors import InputError
from shoestring.optim.offload import PLACES, is_place
from shoestring.training.config import LoopConfig, StepConfig
from shoestring.training.memory import parse_budget
from shoestring.training.options import LOW_RANK, PLANNED_OPTIMIZERS


def check_step(config: StepConfig) -> None:
    """Raise InputError if --memory-budget is no size, or --offload no place."""
    parse_budget(config.memory_budget)
    if isinstance(config, LoopConfig):
        if config.device_memory not in ("auto", "none", "free"):
            parse_budget(config.device_memory, "device-memory")
        parse_budget(config.host_memory, "host-memory")
    if not is_place(config.place):
        raise InputError(f"--offload: expected {PLACES}, got {config.offload}")


def run_conflicts(config: LoopConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of options of `train` and `finetune`."""
    given_options = {
        f"--offload-weights {config.weights_place}": config.weights_place is not None,
        f"--offload {config.offload}": config.offload != "none",
        f"--memory-budget {config.memory_budget}": config.memory_budget is not None,
        f"--activations {config.activations}": config.activations == "offload",
        f"--weights {config.weights}": config.weights not in ("fp32", "bf16"),
        f"--optimizer {config.optimizer}": config.optimizer != "adamw",
        "--optimizer-arg": bool(config.optimizer_arg),
        "--step-in-backward": config.step_in_backward,
    }
    if config.baseline:
        yield from ((option, "--baseline") for option, is_given in given_options.items() if is_given)
    if config.memory_budget is not None and config.activations == "recompute":
        yield f"--memory-budget {config.memory_budget}", "--activations recompute"
    if config.precision == "fp16" and config.step_in_backward:  # loss scaling needs all gradients at once
        yield "--precision fp16", "--step-in-backward"
    yield from plan_conflicts(config)
    yield from optimizer_conflicts(config)
    yield from parallel_conflicts(config, config.parallel, config.compress)


def plan_conflicts(config: LoopConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of an option that asks for a plan, and one that has none."""
    asks = config.asks_plan
    if asks is not None:
        for option in unplanned(config):
            yield asks, option
        if config.device_memory == "none":
            yield asks, "--device-memory none"


def unplanned(config: LoopConfig) -> Iterator[str]:
    """Yield the options for which nothing is planned."""
    refused = {
        "--baseline": config.baseline,
        "--compile": config.compile,
        f"--memory-budget {config.memory_budget}": config.memory_budget is not None,
        f"--parallel {config.parallel}": config.parallel == "hsdp",
        f"--compress {config.compress}": config.compress != "none",
        # A plan leaves the weights of several processes on the device.
        f"--offload-weights {config.weights_place}": config.processes > 1
        and config.weights_place is not None,
        f"--optimizer {config.optimizer}": config.optimizer not in PLANNED_OPTIMIZERS,
    }
    yield from (option for option, is_set in refused.items() if is_set)


def check_shares(accumulate: int, processes: int) -> None:
    """Raise InputError if the processes cannot share the micro-batches of a step."""
    if accumulate % processes:
        raise InputError(
            f"--accumulate: expected a multiple of the {processes} processes, which share the micro-batches of a step, got "
            f"{accumulate}"
        )


def optimizer_conflicts(config: StepConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of ``--optimizer`` and an option that the optimizer cannot have."""
    name = f"--optimizer {config.optimizer}"
    if config.optimizer in LOW_RANK:
        if config.weights not in ("fp32", "bf16"):
            yield name, f"--weights {config.weights}"
        if config.place is not None:
            yield name, f"--offload {config.offload}"
    # Two optimizers cannot share a gradient norm, and a projection needs the whole gradient.
    if config.step_in_backward and config.optimizer in ("muon", *LOW_RANK):
        yield name, "--step-in-backward"


def parallel_conflicts(config: StepConfig, name: str, compress: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of ``--parallel`` with the strategy ``name`` and options that it cannot have."""
    if name == "none":
        if compress != "none":
            yield "--parallel none", f"--compress {compress}"
        return
    splits = name in ("auto", "zero1", "zero2")
    refused = {
        "--baseline": getattr(config, "baseline", False),
        "--compile": getattr(config, "compile", False),
        f"--offload-weights {config.weights_place}": name not in ("zero3", "hsdp")
        and config.weights_place is not None,
        f"--keep {getattr(config, 'keep', '')}": getattr(config, "keep", "0") != "0",
        f"--offload {config.offload}": splits and config.offload == "cpu",
        "--step-in-backward": name not in ("zero3", "hsdp") and config.step_in_backward,
        f"--optimizer {config.optimizer}": splits and config.optimizer in LOW_RANK,
        # the norm of all gradients is known to one optimizer alone
        "--optimizer muon": name in ("auto", "zero2") and config.optimizer == "muon",
        "--precision fp16": name in ("auto", "zero2") and config.precision == "fp16",
    }
    for option, is_set in refused.items():
        if is_set:
            yield f"--parallel {name}", option
    # See parallelize: what nobody can compress is refused before the processes wait for each other.
    if name in ("zero2", "zero3", "hsdp") and compress == "powersgd":
        yield f"--parallel {name}", "--compress powersgd"

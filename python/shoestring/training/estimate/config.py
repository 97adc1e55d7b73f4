"""Options of `shoestring estimate`, in a module that does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from shoestring.core.errors import InputError
from shoestring.training.config import (
    ADAPTER_RANK,
    FROZEN,
    PRESETS,
    QUANTIZE,
    AdapterConfig,
    MixtureConfig,
    StepConfig,
    check_double_quant,
)
from shoestring.training.options import (
    COUNT,
    RANK,
    choice,
    number,
    one_of,
    refuse_together,
)

STRATEGIES = ("auto", "ddp", "zero1", "zero2", "zero3", "hsdp", "diloco", "localsgd")


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Options of several processes: how they share a training, and what connects them."""

    world: Annotated[
        int | None,
        number(
            1,
            1 << 16,
            help="Processes. Then all sizes are those of one of them, which has its part of the --accumulate "
            "micro-batches of a step.",
        ),
    ] = None
    parallel: Annotated[
        str,
        typer.Option(
            help="auto (compare the others but diloco and localsgd), ddp, zero1, zero2, zero3, hsdp, diloco or localsgd: "
            "how the --world processes share the training.",
            callback=one_of(*STRATEGIES),
        ),
    ] = "auto"
    compress: Annotated[
        str, choice("none", "8bit", "4bit", "1bit", help=": of the gradients that processes send.")
    ] = "none"
    every: Annotated[
        int | None,
        number(
            1,
            COUNT,
            help="Steps from one average of weights to the next; by default 500 of diloco, 8 of localsgd.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(help="REPLICASxSHARDS of hsdp, such as 2x4: machines, and processes of each."),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth and latency of each process's link, such as 100Mbit,30ms or 25GB/s,5us. Without it, no time "
            "is estimated."
        ),
    ] = None
    inner_link: Annotated[
        str | None, typer.Option(help="The link of the processes of a machine, for hsdp; by default --link.")
    ] = None
    step_seconds: Annotated[
        float | None,
        number(
            0,
            1e6,
            "above 0",
            without=0,
            help="Measured seconds of forward, backward and optimizer of one process in a step, with --link.",
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each process's device, such as 24GB: whether it fits, and what auto must not exceed."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(StepConfig, AdapterConfig, MixtureConfig, RanksConfig):
    """The model and the training options that decide the memory of a step.

    Without ``rank``, all parameters that require gradients are trained; :meth:`filled` fills in what the commands train.
    """

    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face model directory, config.json or id of the Hub (no weights are read), for finetune; or a "
            "preset of train."
        ),
    ]
    vocab_size: Annotated[int, number(1, (1 << 31) - 1, help="Tokens of a preset's vocabulary.")] = 16384
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu (device and host are one memory), cuda and so on; need not be on this machine."
        ),
    ] = "auto"
    rank: Annotated[
        int | None,
        number(
            *RANK,
            help=f"Train adapters of this rank; by default {ADAPTER_RANK}, and of a preset all weights.",
        ),
    ] = None
    quantize: Annotated[
        str | None, choice(*QUANTIZE, help=f": frozen weights below adapters; by default {FROZEN}.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.experts_of_token()
        if self.experts and self.model not in PRESETS:
            raise InputError(
                f"--experts {self.experts}: expected a preset as --model, since other models say in config.json how many they "
                f"have, got {self.model}"
            )
        _ = self.targets, self.parameter_targets  # they raise InputError if an option names nothing

    @property
    def processes(self) -> int:
        # With diloco and localsgd, each process has a step of its own.
        return 1 if self.parallel in ("diloco", "localsgd") else self.world or 1

    def filled(self) -> EstimateConfig:
        """Return the options with the defaults of the command that trains the model: train for a preset, else finetune.

        Raises:
            InputError: options of frozen weights are given where all weights are trained.
        """
        if self.full:
            given = {
                "--rank": self.rank is not None,
                f"--quantize {self.quantize}": self.quantize is not None,
            }
            refuse_together(("--full", option) for option, is_given in given.items() if is_given)
        if self.rank is None and (self.full or self.model in PRESETS):
            if self.quantize not in (None, "none"):
                raise InputError(
                    f"--quantize {self.quantize}: expected --rank as well, since trained weights are not quantised; "
                    "received none"
                )
            check_double_quant(self.double_quant, None)
            return replace(self, quantize="none")
        quantize = self.quantize or FROZEN
        check_double_quant(self.double_quant, None if quantize == "none" else quantize)
        return replace(self, rank=self.rank or ADAPTER_RANK, quantize=quantize)

    @property
    def trained_leave(self) -> bool:
        return self.world is None and self.rank is None and self.weights_place is not None

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of an activation, which has the dtype of the matrix products."""
        return 4 if self.autocast is None else 2

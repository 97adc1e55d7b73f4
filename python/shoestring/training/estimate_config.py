"""Options of `shoestring estimate`, in a module that does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from shoestring.training.config import QUANTIZE, StepConfig, WeightsConfig
from shoestring.training.options import (
    RANK,
    BatchSize,
    SeqLen,
    TargetModules,
    one_of,
    target_names,
    within,
)


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(StepConfig, WeightsConfig):
    """The model and the training options that decide the memory of a step.

    Without ``rank``, all parameters that require gradients are trained.
    """

    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face model directory or config.json (no weights are read), or a preset of train."
        ),
    ]
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of a preset's vocabulary.", callback=within(1, (1 << 31) - 1))
    ] = 16384
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu (device and host are one memory), cuda and so on; need not be on this machine."
        ),
    ] = "cuda"
    batch_size: BatchSize = 1
    seq_len: SeqLen = 2048
    rank: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank; by default all weights.", callback=RANK),
    ] = None
    quantize: Annotated[
        str,
        typer.Option(
            help="nf4, int4, int8 or none: frozen weights, with --rank.", callback=one_of(*QUANTIZE)
        ),
    ] = "none"
    target_modules: TargetModules = "all-linear"

    def __post_init__(self) -> None:
        target_names(self.target_modules)  # target_names() raises InputError if the option names no module

    @property
    def activation_bytes(self) -> int:
        """Bytes per element of an activation, which has the dtype of the matrix products."""
        return 4 if self.autocast is None else 2

    @property
    def targets(self) -> str | list[str]:
        """The modules that take adapters: "all-linear", or a list of names."""
        return target_names(self.target_modules)

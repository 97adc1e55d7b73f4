"""Options of `shoestring estimate`, in a module that does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from shoestring.training.config import DEVICES, ESTIMATE_DTYPES, OPTIMIZERS, QUANTIZE, STATES, WEIGHTS
from shoestring.training.options import (
    RANK,
    Accumulate,
    BatchSize,
    Checkpointing,
    MemoryBudget,
    Offload,
    SeqLen,
    TargetModules,
    TrustRemoteCode,
    Workspace,
    one_of,
    target_names,
    within,
)


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
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
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, lion, sgd, ademamix, schedule-free-adamw, lamb, adafactor, came; muon with adamw.",
            callback=one_of(*OPTIMIZERS),
        ),
    ] = "adamw"
    state: Annotated[
        str, typer.Option(help="8bit, 4bit, bf16 or fp32: how moments are kept.", callback=one_of(*STATES))
    ] = "8bit"
    weights: Annotated[
        str,
        typer.Option(
            help="plain, stochastic or remainder, how bf16 weights are kept.", callback=one_of(*WEIGHTS)
        ),
    ] = "plain"
    offload: Offload = "none"
    # If the device is "cpu", device memory is host memory, and a chunk of optimizer state may end inside a
    # parameter.
    device: Annotated[
        str,
        typer.Option(help="cuda, or cpu, where device and host are one memory.", callback=one_of(*DEVICES)),
    ] = "cuda"
    dtype: Annotated[
        str,
        typer.Option(
            help="bf16, fp16 or fp32: of the model's weights and activations.",
            callback=one_of(*ESTIMATE_DTYPES),
        ),
    ] = "bf16"
    batch_size: BatchSize = 1
    seq_len: SeqLen = 2048
    # bytes per element of an activation; activations have the dtype of the option dtype
    activation_bytes: int = field(init=False)
    accumulate: Accumulate = 1
    step_in_backward: Annotated[
        bool,
        typer.Option("--step-in-backward", help="Each parameter is stepped once its gradient is complete."),
    ] = False
    gradient_checkpointing: Checkpointing = False
    memory_budget: MemoryBudget = None
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
    workspace_mb: Workspace = 64
    trust_remote_code: TrustRemoteCode = False

    def __post_init__(self) -> None:
        target_names(self.target_modules)  # target_names() raises InputError if the option names no module
        object.__setattr__(self, "activation_bytes", ESTIMATE_DTYPES[self.dtype])

    @property
    def place(self) -> str | None:
        """The value of --offload: where the optimizer state is stored; None if it stays on the device."""
        return None if self.offload == "none" else self.offload

    @property
    def targets(self) -> str | list[str]:
        """The modules that take adapters: "all-linear", or a list of names."""
        return target_names(self.target_modules)

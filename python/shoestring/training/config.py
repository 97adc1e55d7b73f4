"""Configuration of training runs: the options of `train` and `finetune`, and the presets of model sizes.

The command line is built from these classes: each annotated field is an option with the field's default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.core.errors import InputError
from shoestring.training.options import (
    COUNT,
    OPTIMIZERS,
    RANK,
    STATES,
    VOCABULARY,
    Device,
    HostAllocator,
    LearningRate,
    Model,
    Seed,
    TrustRemoteCode,
    WeightDecay,
    choice,
    environment_number,
    number,
    one_of,
    refuse_together,
    target_names,
)

if TYPE_CHECKING:
    from shoestring.optim.schedules import Schedule


@dataclass(frozen=True)
class Preset:
    """Shape of a model with the Llama architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    # Whether the output layer shares the weight of the input embedding, which helps if embeddings are most of
    # the model's size.
    tied: bool = True


PRESETS = {
    "tiny": Preset(64, 2, 2, 2, 192),
    "mini": Preset(128, 4, 4, 4, 384),
    "small": Preset(256, 6, 4, 4, 768),
    "medium": Preset(512, 8, 8, 8, 1536),
    "base": Preset(768, 12, 12, 12, 2048),  # a model of the size of GPT-2 small
    "large": Preset(1024, 24, 16, 16, 2816),
    "1b": Preset(2048, 22, 32, 4, 5632, tied=False),  # a model of the shape of TinyLlama
}

# Allowed values of command-line options. This module does not import PyTorch, so that parsing of options is
# fast.
PARALLEL = ("none", "auto", "ddp", "zero1", "zero2", "zero3", "hsdp")
COMPRESS = ("none", "8bit", "4bit", "1bit", "powersgd")
SCHEDULES = ("constant", "linear", "cosine", "wsd", "flat-cos", "inverse-sqrt")
MOST_THREADS = max(256, os.cpu_count() or 1)  # a request for tens of thousands of threads kills the process
QUANTIZE = ("nf4", "int4", "int8", "none")
MOST_EXPERTS = 2048
ADAPTER_RANK, FROZEN = 16, "nf4"  # defaults of finetune, which estimate shares
# Values of model_type of models whose layers are Conv1D of transformers, which cannot be quantised. Their frozen
# weights are dense by default.
CONV1D_MODELS = ("gpt2", "openai-gpt")
DENSE = "frozen weights stay dense: the model's layers are Conv1D, which cannot be quantised"
# --weights -> how an optimizer updates the trained weights (its option `weight_rounding`)
ROUNDING = {
    "fp32": "nearest",
    "bf16": "nearest",
    "bf16-stochastic": "stochastic",
    "bf16-remainder": "remainder",
}


# Options that only a plan follows.
ONLY_PLANNED = ("disk", "host_memory", "freedom", "replan")

# Metadata of fields whose value may differ when a run is resumed. The values of all other fields must be
# equal.
MAY_CHANGE = {"may_change": True}


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Options that decide the memory of a training step, and that `estimate` shares with training."""

    batch_size: Annotated[int, number(1, 1 << 16, help="Rows in a micro-batch.")] = 8
    seq_len: Annotated[int, number(1, 1 << 24, help="Tokens in a row.")] = 512
    accumulate: Annotated[
        int,
        number(
            0,
            1 << 16,
            "0 or more",
            help="Micro-batches in a step, a multiple of the processes; 0 is one for each process.",
        ),
    ] = 0
    precision: Annotated[
        str,
        choice(
            "auto",
            "fp32",
            "tf32",
            "bf16",
            "fp16",
            help=": of matrix products. auto takes the fastest here that agrees with fp32; fp16 scales the loss.",
        ),
    ] = "auto"
    weights: Annotated[str, choice(*ROUNDING, help=": how trained weights are stored and rounded.")] = "fp32"
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, lion, sgd, ademamix, schedule-free-adamw, lamb, adafactor, came; muon, galore, apollo and "
            "apollo-mini, with adamw for embeddings and vectors.",
            callback=one_of(*OPTIMIZERS),
        ),
    ] = "adamw"
    optimizer_state: Annotated[str, choice(*STATES, help=": how moments are stored.")] = "8bit"
    optimizer_arg: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, another option of the optimizer; may be given several times."),
    ] = None
    step_in_backward: Annotated[
        bool,
        typer.Option("--step-in-backward", help="Each parameter is stepped once its gradient is complete."),
    ] = False
    offload: Annotated[
        str, typer.Option(help="none, cpu, stream or nvme:DIR: where the optimizer's state lies.")
    ] = field(default="none", metadata=MAY_CHANGE)
    activations: Annotated[
        str,
        choice("keep", "recompute", "offload", help=" (to host memory): of each block, until its backward."),
    ] = field(default="keep", metadata=MAY_CHANGE)
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Largest memory for activations, such as 2GiB: as many blocks are recomputed, or with "
            "--activations offload copied to host memory, as that needs."
        ),
    ] = field(default=None, metadata=MAY_CHANGE)
    workspace_mb: Annotated[int, number(1, 1 << 20, help="Memory of the fused loss, in MiB.")] = 64
    trust_remote_code: TrustRemoteCode = field(default=False, metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        if self.accumulate == 0:
            object.__setattr__(self, "accumulate", self.processes)
        if self.precision == "auto" and self.weights != "fp32":  # bf16 weights need products in bf16
            object.__setattr__(self, "precision", "bf16")

    @property
    def processes(self) -> int:
        """The number of processes that share the micro-batches of a step."""
        return 1

    @property
    def place(self) -> str | None:
        """The value of --offload: where the optimizer state is stored; None if it stays on the device."""
        return None if self.offload == "none" else self.offload

    @property
    def weights_place(self) -> str | None:
        """The value of --offload-weights; None if weights stay on the device, also for commands without the option."""
        place: str = getattr(self, "offload_weights", "none")
        return None if place == "none" else place

    @property
    def trained_leave(self) -> bool:
        """Whether trained weights are among those that --offload-weights moves."""
        return False

    @property
    def autocast(self) -> str | None:
        """The 16-bit dtype of matrix products, "bf16" or "fp16"; None if they are not computed in 16 bits.

        It is None for "auto", too, whose products are in fp32 until another precision is chosen.
        """
        return self.precision if self.precision in ("bf16", "fp16") else None


@dataclass(frozen=True, kw_only=True)
class LoopConfig(StepConfig):
    """Options of the training loop of the commands `train` and `finetune`.

    Two runs with equal options and equal data on the same device give bitwise equal results.
    """

    device: Device = field(default="auto", metadata=MAY_CHANGE)
    steps: Annotated[int, number(1, COUNT, help="Optimizer steps.")] = 200
    lr: LearningRate = 1e-3
    warmup: Annotated[int, number(0, COUNT, "0 or more", help="Steps of linear warm-up.")] = 10
    schedule: Annotated[str, choice(*SCHEDULES, help=".")] = "cosine"
    clip: Annotated[float, number(0, 1e30, "0 or more", help="Largest gradient norm; 0 does not clip.")] = 1.0
    weight_decay: WeightDecay = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    seed: Seed = 0
    val_fraction: Annotated[
        float, number(0, 1, "0 to less than 1", without=1, help="Share of the data held out for validation.")
    ] = 0.02
    eval_every: Annotated[int, number(1, COUNT, help="Steps between validations.")] = 50
    eval_batches: Annotated[int, number(1, COUNT, help="Most batches in a validation.")] = 8
    checkpoint_every: Annotated[int, number(1, COUNT, help="Steps between checkpoints.")] = field(
        default=50, metadata=MAY_CHANGE
    )
    device_memory: Annotated[
        str,
        typer.Option(
            help="Most memory of the device, such as 8GiB or free; on a CPU of the whole process. The micro-batch, what blocks do "
            "with their activations, and the state of the optimizer are planned; options that are given stay. auto is free where "
            "planning pays, and none plans nothing."
        ),
    ] = field(default="auto", metadata=MAY_CHANGE)
    disk: Annotated[
        str | None,
        typer.Option(help="DIR or DIR=200GiB: a folder for what a plan does not fit into memory."),
    ] = field(default=None, metadata=MAY_CHANGE)
    host_memory: Annotated[
        str | None,
        typer.Option(help="With a GPU: most host memory for what a plan lets leave the device."),
    ] = field(default=None, metadata=MAY_CHANGE)
    freedom: Annotated[
        str,
        choice(
            "exact",
            "rounding",
            help=": what a plan may change. rounding allows bf16 and 4-bit state, and steps in backward.",
        ),
    ] = field(default="exact", metadata=MAY_CHANGE)
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False
    log_every: Annotated[
        int | None,
        number(
            1,
            COUNT,
            help="Steps between reads of loss and norm from the device; by default 1 on the CPU, else 10.",
        ),
    ] = field(default=None, metadata=MAY_CHANGE)
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --out from its newest checkpoint, bit for bit."),
    ] = field(default=False, metadata=MAY_CHANGE)
    replan: Annotated[
        bool,
        typer.Option("--replan", help="With --resume: plan anew, for example after memory ran out."),
    ] = field(default=False, metadata=MAY_CHANGE)
    baseline: Annotated[bool, typer.Option("--baseline", help="The same with plain PyTorch, to compare.")] = (
        False
    )
    threads: Annotated[
        int | None, number(1, MOST_THREADS, help="CPU threads; by default what PyTorch takes.")
    ] = field(default=None, metadata=MAY_CHANGE)
    host_allocator: HostAllocator = field(default=None, metadata=MAY_CHANGE)
    parallel: Annotated[
        str,
        choice(
            *PARALLEL,
            help=": how the processes that torchrun has started share the training; each takes its part of the --accumulate "
            "micro-batches of a step. With auto, or without the option, a plan decides; without a plan, the memory that is free.",
        ),
    ] = field(default="none", metadata=MAY_CHANGE)
    compress: Annotated[
        str,
        choice(
            *COMPRESS,
            help=": how processes send gradients, for links that are slower than backward; with --parallel. A resumed run "
            "begins without what the last codes have left out.",
        ),
    ] = field(default="none", metadata=MAY_CHANGE)

    # names of the options that the user gave, which a plan does not change
    given: frozenset[str] = field(default=frozenset(), metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        if self.parallel == "none" and "parallel" not in self.given and self._needs_strategy:
            object.__setattr__(self, "parallel", "auto")
        super().__post_init__()

    @property
    def _needs_strategy(self) -> bool:
        """Whether several processes share the training, which a plan may divide among them."""
        may_be_planned = not self.baseline and self.device_memory != "none"
        return may_be_planned and environment_number("WORLD_SIZE", 1) > 1

    @property
    def processes(self) -> int:
        return 1 if self.parallel == "none" else max(1, environment_number("WORLD_SIZE", 1))

    @property
    def asks_plan(self) -> str | None:
        """The option that asks for a plan, as text; None if none does, so that "auto" decides or nothing is planned."""
        if self.device_memory not in ("auto", "none"):
            return f"--device-memory {self.device_memory}"
        for name in ONLY_PLANNED:
            value = getattr(self, name)
            if value != getattr(LoopConfig, name):
                option = f"--{name.replace('_', '-')}"
                return option if value is True else f"{option} {value}"
        return None

    @property
    def blocks_place(self) -> str | None:
        """The place where whole weights of blocks lie; None if they stay, or if processes move their parts."""
        return None if self.processes > 1 else self.weights_place

    @property
    def result(self) -> str:
        """The name of the folder of a run with what it has trained."""
        return "model"

    def learning_rates(self) -> Schedule:
        """Return the learning rate as a function of the step."""
        from shoestring.optim.schedules import Schedule

        name = self.schedule.replace("-", "_")
        steps = None if name in ("constant", "inverse_sqrt") else self.steps
        return Schedule(name, steps=steps, warmup=min(self.warmup, self.steps), peak=self.lr)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that must be equal when a run is resumed, as JSON values."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if "may_change" not in each.metadata
        }
        fixed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        # State of sharded weights is stored in another form.
        return fixed | {"sharded_weights": True} if self.parallel in ("zero3", "hsdp") else fixed


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Options of `finetune` and `estimate`: what is trained of a model, and where the weights of its blocks lie."""

    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False
    double_quant: Annotated[
        bool,
        typer.Option(
            "--double-quant", help="Quantise the scales of nf4 to 8 bits, 0.37 bits fewer for each parameter."
        ),
    ] = False
    target_modules: Annotated[str, typer.Option(help="all-linear, or names separated by commas.")] = (
        "all-linear"
    )
    target_parameters: Annotated[
        str | None,
        typer.Option(
            help="Names of stacked weights of experts, separated by commas, that all-linear does not reach, such as "
            "gate_up_proj,down_proj of gpt-oss."
        ),
    ] = None
    offload_weights: Annotated[
        str,
        typer.Option(
            help="none, cpu or nvme:DIR: where the weights of the model's blocks lie while no block needs them, or with "
            "--parallel zero3 the part of each process. Trained weights also need --step-in-backward in one process."
        ),
    ] = field(default="none", metadata=MAY_CHANGE)
    keep: Annotated[
        str, typer.Option(help="With --offload-weights: weights of the first blocks that stay, such as 1GiB.")
    ] = field(default="0", metadata=MAY_CHANGE)

    @property
    def targets(self) -> str | list[str]:
        """The modules that take adapters: "all-linear", or a list of names."""
        return target_names(self.target_modules)

    @property
    def parameter_targets(self) -> list[str]:
        """The names of the stacked weights that take adapters beside the modules."""
        if self.target_parameters is None:
            return []
        names = target_names(self.target_parameters, "--target-parameters", "names")
        return [names] if isinstance(names, str) else names


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Options of `train` and `estimate`: the experts in place of the MLPs of a preset."""

    experts: Annotated[
        int,
        number(
            0,
            MOST_EXPERTS,
            "0 or more",
            help="Experts in place of each MLP, each of its size, between which a router chooses; 0 is one MLP for all tokens.",
        ),
    ] = 0
    top_k: Annotated[
        int | None, number(1, MOST_EXPERTS, help="With --experts: experts of a token; by default 2.")
    ] = None

    def experts_of_token(self) -> int:
        """Return the number of experts of a token.

        Raises:
            InputError: there are fewer experts, or none.
        """
        if self.top_k is not None and not self.experts:
            raise InputError(f"--top-k {self.top_k}: expected --experts with it, got none")
        if self.top_k is not None and self.top_k > self.experts:
            raise InputError(f"--top-k: expected 1 to --experts, {self.experts}, got {self.top_k}")
        return min(2, self.experts) if self.top_k is None else self.top_k


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig, MixtureConfig):
    """Options of `shoestring train`, which trains a model from scratch."""

    preset: Annotated[
        str,
        typer.Option(help="Size: tiny, mini, small, medium, base, large or 1b.", callback=one_of(*PRESETS)),
    ] = "small"
    vocab_size: Annotated[
        int, number(*VOCABULARY, help="Tokens of the BPE tokenizer that is trained on the data.")
    ] = 16384
    tokenizer: Annotated[
        Path | None, typer.Option(help="Take this tokenizer directory instead of training one.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.experts_of_token()

    def fixed(self) -> dict[str, Any]:
        tokenizer = str(self.tokenizer) if self.tokenizer else None
        return super().fixed() | {"tokenizer": tokenizer, "top_k": self.experts_of_token()}


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(LoopConfig, AdapterConfig):
    """Options of `shoestring finetune`: LoRA, QLoRA or full fine-tuning of an existing model.

    Raises:
        InputError: options contradict each other. The parser has checked each option alone.
    """

    model: Model
    quantize: Annotated[
        str | None,
        typer.Option(
            help=f"nf4 (QLoRA), int4, int8 or none (LoRA): how frozen weights are kept; by default {FROZEN}, and none "
            "for GPT-2, whose layers are Conv1D.",
            callback=one_of(*QUANTIZE),
        ),
    ] = None
    rank: Annotated[int, number(*RANK, help="Rank of the adapters.")] = ADAPTER_RANK
    alpha: Annotated[
        float, number(0, 1e6, "a positive number", without=0, help="Adapters are scaled by alpha / rank.")
    ] = 32.0
    merge: Annotated[
        bool, typer.Option("--merge", help="Also save the model with the adapter merged into it.")
    ] = field(default=False, metadata=MAY_CHANGE)
    pack: Annotated[
        str,
        typer.Option(
            help="none (examples are padded), batch (the --batch-size examples in one row, where the model's "
            "attention is ours) or fill (as many as fit into --batch-size x --seq-len tokens).",
            callback=one_of("none", "batch", "fill"),
        ),
    ] = "batch"
    lr: LearningRate = 2e-4
    weight_decay: WeightDecay = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.targets, self.parameter_targets  # they raise InputError if an option names nothing
        # The int8 layer of bitsandbytes also rounds its input to 8 bits, so it computes a different model
        # than shoestring's int8. bitsandbytes has no int4 layer.
        if self.baseline and self.frozen_format not in (None, "nf4"):
            raise InputError(f"--quantize: expected nf4 | none with --baseline, got {self.quantize}")
        check_double_quant(self.double_quant, self.frozen_format)
        if self.baseline and self.pack == "fill":
            refuse_together([("--pack fill", "--baseline")])
        if self.full:
            names = ("rank", "alpha", "target_modules", "target_parameters", "merge")
            full_conflicts = ["quantize"] if self.quantize not in (None, "none") else []
            full_conflicts += [name for name in names if getattr(self, name) != getattr(FinetuneConfig, name)]
            refuse_together(("--full", f"--{name.replace('_', '-')}") for name in full_conflicts)

    @property
    def frozen_format(self) -> str | None:
        """The quantised format of the frozen weights, or None if no weight is quantised."""
        return None if self.full or self.quantize == "none" else self.quantize or FROZEN

    @property
    def result(self) -> str:
        return "model" if self.full else "adapter"

    @property
    def trained_leave(self) -> bool:
        return self.full and self.blocks_place is not None

    def fixed(self) -> dict[str, Any]:
        return super().fixed() | {"quantize": self.frozen_format, "target_modules": self.targets}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(FinetuneConfig):
    """Options of `shoestring plan`, which plans a fine-tuning, also for processes that are not here."""

    world: Annotated[
        int | None,
        number(
            1,
            1 << 16,
            help="Processes that share the training. Then the plan, and its memory, are those of one of them.",
        ),
    ] = field(default=None, metadata=MAY_CHANGE)
    link: Annotated[
        str | None,
        typer.Option(
            help="With --world: bandwidth and latency of each process's link, such as 100Mbit,30ms or 25GB/s,5us."
        ),
    ] = field(default=None, metadata=MAY_CHANGE)

    @property
    def _needs_strategy(self) -> bool:
        return self.processes > 1

    @property
    def processes(self) -> int:
        return self.world or 1


def default_format(model_type: object) -> str:
    """Return the default of --quantize for a model with this ``model_type`` in its config.json."""
    return "none" if model_type in CONV1D_MODELS else FROZEN


def check_double_quant(double_quant: bool, frozen: str | None) -> None:
    """Raise InputError for --double-quant without weights in nf4."""
    if double_quant and frozen != "nf4":
        raise InputError(
            f"--double-quant: expected frozen weights in nf4, got {frozen or 'dense ones'}; leave it out"
        )


def require_equal(now: dict[str, Any], before: dict[str, Any], run: str) -> None:
    """Raise an InputError if a setting of a run that is resumed differs; name the first such setting."""
    for key in dict.fromkeys([*now, *before]):
        if now.get(key) != before.get(key):
            difference = _difference(before.get(key), now.get(key))
            raise InputError(
                f"--resume {run}: {key} differs: {difference}; give the same value or another --out"
            )


def _difference(before: Any, now: Any) -> str:
    """Describe how a setting differs; of lists of files, such as ["a.txt", 5, "0a"], name the first that differs."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for old, new in zip(before, now):
            if old != new and isinstance(old, list) and isinstance(new, list) and old[:1] == new[:1]:
                return f"{_short(old[0])} has other contents than the run has read"
    return f"the run has {_short(before)}, this command has {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

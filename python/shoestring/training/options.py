"""Options that several commands share, and the checks of single values while the command line is parsed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from shoestring.core.errors import InputError

LOW_RANK = ("galore", "apollo", "apollo-mini")
OPTIMIZERS = (
    "adamw", "lion", "sgd", "ademamix", "schedule-free-adamw", "lamb", "adafactor", "came", "muon", *LOW_RANK,
)  # fmt: skip
COUNT = 10**9  # maximum of options that count steps, or events that happen at most once per step


def refuse_together(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise InputError for the first of the pairs of options, which cannot be combined, if there is one."""
    for option, other in pairs:
        raise InputError(f"{option}: expected no {other}, received both; leave one of them out")


def environment_number(name: str, default: int) -> int:
    """Return a number of the environment of torchrun, such as WORLD_SIZE; ``default`` without torchrun."""
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise InputError(f"{name}: expected a number in the environment, as torchrun sets it, got {text}")
    return int(text)


def within(
    least: float, most: float, expected: str | None = None, *, without: float | None = None
) -> Callable[..., Any]:
    """Return the callback of a numeric option that must be between ``least`` and ``most``.

    Args:
        expected: text for the error message if the value is too small, such as "above 0". The message also
            has this text if the value is too large and ``without`` is ``most``.
        without: ``least`` or ``most``, if this value itself is not allowed.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        # NaN fails every comparison.
        if value is not None and not (least <= value <= most and value != without):
            beyond = value > most and without != most
            _refuse(param, f"at most {most}" if beyond else expected or f"at least {least}", value)
        return value

    return check


def one_of(*choices: str) -> Callable[..., Any]:
    """Return the callback of an option that must be one of ``choices``."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value not in choices:
            _refuse(param, " | ".join(choices), value)
        return value

    return check


def _refuse(param: typer.CallbackParam, expected: str, value: Any) -> None:
    received = str(value)
    received = received if len(received) <= 80 else received[:77] + "..."
    raise InputError(f"{param.opts[0]}: expected {expected}, got {received}")


def target_names(text: str) -> str | list[str]:
    """Return "all-linear", or the list of the names separated by commas, without surrounding spaces."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--target-modules: expected all-linear, or names separated by commas; got none")
    return "all-linear" if names == ["all-linear"] else names


# A vocabulary has at least the 256 bytes and the end-of-text token. It is limited, since tokenizer trainers
# allocate memory for every token.
VOCABULARY = within(257, 1 << 20)
# the rank is at most the width of a layer, and no published model has a wider layer
RANK = within(1, 1 << 14)

DoubleQuant = Annotated[
    bool,
    typer.Option(
        "--double-quant", help="Quantise the scales of nf4 to 8 bits, 0.37 bits fewer for each parameter."
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")]
Model = Annotated[str, typer.Option(help="Hugging Face model directory, or an id of the Hub.")]
SeqLen = Annotated[int, typer.Option(help="Tokens in a row.", callback=within(1, 1 << 24))]
BatchSize = Annotated[int, typer.Option(help="Rows in a micro-batch.", callback=within(1, 1 << 16))]
Accumulate = Annotated[
    int,
    typer.Option(
        help="Micro-batches in a step, a multiple of the processes; 0 is one for each process.",
        callback=within(0, 1 << 16, "0 or more"),
    ),
]
LearningRate = Annotated[
    float,
    typer.Option(help="Highest learning rate.", callback=within(0, 1e38, "a positive number", without=0)),
]
WeightDecay = Annotated[
    float, typer.Option(help="Decoupled weight decay of matrices.", callback=within(0, 1000, "0 or more"))
]
Seed = Annotated[
    int,
    typer.Option(
        help="Weights, data order and split follow from it.",
        callback=within(0, (1 << 32) - 1, "0 to 4294967295"),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (the accelerator, if there is one), cpu, cuda, cuda:1, or an installed backend of PyTorch."
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="fp32, tf32, bf16 or fp16: of matrix products; fp16 scales the loss.",
        callback=one_of("fp32", "tf32", "bf16", "fp16"),
    ),
]
TrainedWeights = Annotated[
    str,
    typer.Option(
        help="fp32, bf16, bf16-stochastic or bf16-remainder: how trained weights are stored and rounded.",
        callback=one_of("fp32", "bf16", "bf16-stochastic", "bf16-remainder"),
    ),
]
OptimizerName = Annotated[
    str,
    typer.Option(
        help="adamw, lion, sgd, ademamix, schedule-free-adamw, lamb, adafactor, came; muon, galore, apollo and "
        "apollo-mini, with adamw for embeddings and vectors.",
        callback=one_of(*OPTIMIZERS),
    ),
]
STATE_CHECK = one_of("8bit", "4bit", "bf16", "fp32")
OptimizerState = Annotated[
    str, typer.Option(help="8bit, 4bit, bf16 or fp32: how moments are stored.", callback=STATE_CHECK)
]
OptimizerArg = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE, another option of the optimizer; may be given several times."),
]
StepInBackward = Annotated[
    bool,
    typer.Option("--step-in-backward", help="Each parameter is stepped once its gradient is complete."),
]
Parallel = Annotated[
    str,
    typer.Option(
        help="none, auto, ddp, zero1, zero2, zero3 or hsdp: how the processes that torchrun has started share the "
        "training; each takes its part of the --accumulate micro-batches of a step.",
        callback=one_of("none", "auto", "ddp", "zero1", "zero2", "zero3", "hsdp"),
    ),
]
Compress = Annotated[
    str,
    typer.Option(
        help="none, 8bit, 4bit, 1bit or powersgd: how processes send gradients, for links that are slower than backward; "
        "with --parallel. A resumed run begins without what the last codes have left out.",
        callback=one_of("none", "8bit", "4bit", "1bit", "powersgd"),
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        help="keep, recompute or offload (to host memory): of each block, until its backward.",
        callback=one_of("keep", "recompute", "offload"),
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help="Largest memory for activations, such as 2GiB: as many blocks are recomputed, or with "
        "--activations offload copied to host memory, as that needs."
    ),
]
Offload = Annotated[
    str, typer.Option(help="none, cpu, stream or nvme:DIR: where the optimizer's state lies.")
]
OffloadWeights = Annotated[
    str,
    typer.Option(
        help="none, cpu or nvme:DIR: where the weights of the model's blocks lie while no block needs them, or with "
        "--parallel zero3 the part of each process. Trained weights also need --step-in-backward in one process."
    ),
]
Keep = Annotated[
    str, typer.Option(help="With --offload-weights: weights of the first blocks that stay, such as 1GiB.")
]
HostAllocator = Annotated[
    bool | None,
    typer.Option(
        "--host-allocator/--no-host-allocator",
        help="Keep freed memory of CPU tensors for reuse, in huge pages; by default on the CPU, but not with "
        "--baseline.",
    ),
]
Workspace = Annotated[
    int, typer.Option(help="Memory of the fused loss, in MiB.", callback=within(1, 1 << 20))
]
TargetModules = Annotated[str, typer.Option(help="all-linear, or names separated by commas.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the directory brings (auto_map).")
]

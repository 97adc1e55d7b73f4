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
PLANNED_OPTIMIZERS = ("adamw", "lion", "sgd", "lamb", "ademamix")  # those for which --device-memory plans
STATES = ("8bit", "4bit", "bf16", "fp32")
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


def number(
    least: float, most: float, expected: str | None = None, *, help: str, without: float | None = None
) -> Any:
    """Return a numeric option that must be between ``least`` and ``most``.

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

    return typer.Option(help=help, callback=check)


def one_of(*choices: str) -> Callable[..., Any]:
    """Return the callback of an option that must be one of ``choices``."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and value not in choices:
            _refuse(param, " | ".join(choices), value)
        return value

    return check


def choice(*choices: str, help: str) -> Any:
    """Return an option that must be one of ``choices``, which its help lists before the text ``help``."""
    return typer.Option(help=f"{', '.join(choices[:-1])} or {choices[-1]}{help}", callback=one_of(*choices))


def _refuse(param: typer.CallbackParam, expected: str, value: Any) -> None:
    received = str(value)
    received = received if len(received) <= 80 else received[:77] + "..."
    raise InputError(f"{param.opts[0]}: expected {expected}, got {received}")


def target_names(
    text: str, option: str = "--target-modules", expected: str = "all-linear, or names"
) -> str | list[str]:
    """Return "all-linear", or the list of the names separated by commas, without surrounding spaces."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option}: expected {expected} separated by commas; got none")
    return "all-linear" if names == ["all-linear"] else names


# A vocabulary has at least the 256 bytes and the end-of-text token. It is limited, since tokenizer trainers
# allocate memory for every token.
VOCABULARY = (257, 1 << 20)
# the rank is at most the width of a layer, and no published model has a wider layer
RANK = (1, 1 << 14)

Model = Annotated[str, typer.Option(help="Hugging Face model directory, or an id of the Hub.")]
LearningRate = Annotated[
    float, number(0, 1e38, "a positive number", without=0, help="Highest learning rate.")
]
WeightDecay = Annotated[float, number(0, 1000, "0 or more", help="Decoupled weight decay of matrices.")]
Seed = Annotated[
    int, number(0, (1 << 32) - 1, "0 to 4294967295", help="Weights, data order and split follow from it.")
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (the accelerator, if there is one), cpu, cuda, cuda:1, or an installed backend of PyTorch."
    ),
]
HostAllocator = Annotated[
    bool | None,
    typer.Option(
        "--host-allocator/--no-host-allocator",
        help="Keep freed memory of CPU tensors for reuse, in huge pages; by default on the CPU, but not with "
        "--baseline.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the directory brings (auto_map).")
]

"""Options that do not configure training: the text to read, the run folder, the options of `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoestring.training.options import Device, Model, Seed, TrustRemoteCode, choice, number

RunFolder = Annotated[Path, typer.Option(help="Directory of the run; must be new or empty.")]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The text that a command reads."""

    data: Annotated[
        list[Path], typer.Option(help="Text files, JSONL files or directories; several may follow.")
    ]
    glob: Annotated[str, typer.Option(help="Which files of a directory are read.")] = "*"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `shoestring generate`, which continues a prompt."""

    prompt: Annotated[str, typer.Argument(help="Text to continue.")]
    model: Model
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter directory to put on the model.")] = None
    any_base: Annotated[
        bool,
        typer.Option("--any-base", help="Put an adapter of another base on the model, if the shapes fit."),
    ] = False
    max_new_tokens: Annotated[int, number(1, 10**6, help="Most tokens to write.")] = 100
    temperature: Annotated[float, number(0, 1000, "0 or more", help="0 takes the likeliest token.")] = 0.8
    top_p: Annotated[
        float,
        number(
            0,
            1,
            "more than 0, at most 1",
            without=0,
            help="Draw among the likeliest tokens of this total probability.",
        ),
    ] = 0.95
    device: Device = "auto"
    precision: Annotated[str, choice("fp32", "bf16", "fp16", help=": of the weights.")] = "fp32"
    seed: Seed = 0
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the chat template.")
    ] = False
    trust_remote_code: TrustRemoteCode = False

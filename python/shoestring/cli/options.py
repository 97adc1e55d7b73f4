"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoestring.cli.values import COUNT, one_of, within
from shoestring.training.config import DTYPES, MOST_THREADS, SCHEDULES

# at least 256 bytes and the end-of-text token; trainers allocate memory for every token
VOCABULARY = within(257, 1 << 20)
RANK = within(1, 1 << 14)  # no published model has a wider layer

Data = Annotated[
    list[Path], typer.Option("--data", help="Text files, JSONL files or directories; several may follow.")
]
Out = Annotated[Path, typer.Option(help="Directory of the run; must be new or empty.")]
Glob = Annotated[str, typer.Option("--glob", help="Which files of a directory are read.")]
SeqLen = Annotated[int, typer.Option(help="Tokens in a row.", callback=within(1, 1 << 24))]
BatchSize = Annotated[int, typer.Option(help="Rows in a micro-batch.", callback=within(1, 1 << 16))]
Accumulate = Annotated[int, typer.Option(help="Micro-batches in a step.", callback=within(1, 1 << 16))]
Steps = Annotated[int, typer.Option(help="Optimizer steps.", callback=within(1, COUNT))]
LearningRate = Annotated[
    float,
    typer.Option(
        "--lr", help="Highest learning rate.", callback=within(0, 1e38, "a positive number", without=0)
    ),
]
Warmup = Annotated[int, typer.Option(help="Steps of linear warm-up.", callback=within(0, COUNT, "0 or more"))]
Schedule = Annotated[str, typer.Option(help="constant, linear, cosine or wsd.", callback=one_of(*SCHEDULES))]
Dtype = Annotated[
    str, typer.Option(help="fp32, or bf16 (autocast over fp32 trained weights).", callback=one_of(*DTYPES))
]
Clip = Annotated[
    float, typer.Option(help="Largest gradient norm; 0 does not clip.", callback=within(0, 1e30, "0 or more"))
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
ValFraction = Annotated[
    float,
    typer.Option(
        help="Share of the data held out for validation.",
        callback=within(0, 1, "0 to less than 1", without=1),
    ),
]
EvalEvery = Annotated[int, typer.Option(help="Steps between validations.", callback=within(1, COUNT))]
EvalBatches = Annotated[int, typer.Option(help="Most batches in a validation.", callback=within(1, COUNT))]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.", callback=within(1, COUNT))]
Checkpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", help="Recompute activations.")
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help="Largest memory for activations, such as 2GiB: as many blocks are recomputed as that needs."
    ),
]
Offload = Annotated[
    str, typer.Option(help="none, cpu, stream or nvme:DIR: where the optimizer's state lies.")
]
OptimizerState = Annotated[
    str, typer.Option(help="8bit or fp32; plain runs always keep fp32.", callback=one_of("8bit", "fp32"))
]
Workspace = Annotated[
    int, typer.Option(help="Memory of the fused loss, in MiB.", callback=within(1, 1 << 20))
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out from its newest checkpoint, bit for bit.")
]
Plain = Annotated[bool, typer.Option("--plain", help="The same with plain PyTorch, to compare.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the directory brings (auto_map).")
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads; by default what PyTorch takes.", callback=within(1, MOST_THREADS)),
]

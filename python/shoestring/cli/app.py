"""Commands and their options. An error that the user can correct is printed in one line, with exit code 2."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.cli.options import (
    RANK,
    VOCABULARY,
    Accumulate,
    BatchSize,
    CheckpointEvery,
    Checkpointing,
    Clip,
    Data,
    Dtype,
    EvalBatches,
    EvalEvery,
    Glob,
    LearningRate,
    MemoryBudget,
    Offload,
    OptimizerState,
    Out,
    Plain,
    Resume,
    Schedule,
    Seed,
    SeqLen,
    Steps,
    Threads,
    TrustRemoteCode,
    ValFraction,
    Warmup,
    WeightDecay,
    Workspace,
)
from shoestring.cli.values import COUNT, one_of, target_names, within
from shoestring.core.errors import InputError, is_utf8
from shoestring.files.atomic import disk_error
from shoestring.training.config import (
    DEVICES,
    ESTIMATE_DTYPES,
    OPTIMIZERS,
    PRESETS,
    QUANTIZE,
    STATES,
    WEIGHTS,
    FinetuneConfig,
    TrainConfig,
)
from shoestring.training.signals import Interrupted, handled

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def shoestring() -> None:
    """Train and fine-tune language models in little memory."""


@app.command()
def train(
    data: Data,
    out: Out,
    glob: Glob = "*",
    preset: Annotated[
        str,
        typer.Option(help="Size: tiny, mini, small, medium, base, large or 1b.", callback=one_of(*PRESETS)),
    ] = "small",
    vocab_size: Annotated[
        int,
        typer.Option(help="Tokens of the BPE tokenizer that is trained on the data.", callback=VOCABULARY),
    ] = 16384,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Take this tokenizer directory instead of training one.")
    ] = None,
    seq_len: SeqLen = 512,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    steps: Steps = 200,
    lr: LearningRate = 1e-3,
    warmup: Warmup = 10,
    schedule: Schedule = "cosine",
    dtype: Dtype = "fp32",
    clip: Clip = 1.0,
    weight_decay: WeightDecay = 0.1,
    seed: Seed = 0,
    val_fraction: ValFraction = 0.02,
    eval_every: EvalEvery = 50,
    eval_batches: EvalBatches = 8,
    checkpoint_every: CheckpointEvery = 50,
    gradient_checkpointing: Checkpointing = False,
    memory_budget: MemoryBudget = None,
    optimizer_state: OptimizerState = "8bit",
    offload: Offload = "none",
    workspace_mb: Workspace = 64,
    resume: Resume = False,
    plain: Plain = False,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a Llama-architecture model from scratch on text."""
    values = locals()
    config = TrainConfig(**pick(TrainConfig, values, tokenizer=str(tokenizer) if tokenizer else None))
    load_operators()
    from shoestring.cli.train import train as run
    from shoestring.training.run import RunOptions

    own = RunOptions(out, resume, checkpoint_every, threads, memory_budget, offload, trust_remote_code)
    finish(run(config, own, data, glob), out)


@app.command()
def finetune(
    data: Data,
    out: Out,
    model: Annotated[str, typer.Option(help="Hugging Face model directory, or an id of the Hub.")],
    glob: Glob = "*",
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of an adapter.")] = False,
    quantize: Annotated[
        str,
        typer.Option(
            help="nf4 (QLoRA), int4, int8 or none (LoRA): how frozen weights are kept.",
            callback=one_of(*QUANTIZE),
        ),
    ] = "nf4",
    rank: Annotated[int, typer.Option(help="Rank of the adapters.", callback=RANK)] = 16,
    alpha: Annotated[
        float,
        typer.Option(
            help="Adapters are scaled by alpha / rank.",
            callback=within(0, 1e6, "a positive number", without=0),
        ),
    ] = 32.0,
    target_modules: Annotated[
        str, typer.Option(help="all-linear, or names separated by commas.")
    ] = "all-linear",
    merge: Annotated[
        bool, typer.Option("--merge", help="Also save the model with the adapter merged into it.")
    ] = False,
    pack: Annotated[
        bool,
        typer.Option("--pack/--no-pack", help="No padding of examples, where the model's attention is ours."),
    ] = True,
    seq_len: SeqLen = 512,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    steps: Steps = 200,
    lr: LearningRate = 2e-4,
    warmup: Warmup = 10,
    schedule: Schedule = "cosine",
    dtype: Dtype = "fp32",
    clip: Clip = 1.0,
    weight_decay: WeightDecay = 0.0,
    seed: Seed = 0,
    val_fraction: ValFraction = 0.02,
    eval_every: EvalEvery = 50,
    eval_batches: EvalBatches = 8,
    checkpoint_every: CheckpointEvery = 50,
    gradient_checkpointing: Checkpointing = False,
    memory_budget: MemoryBudget = None,
    optimizer_state: OptimizerState = "8bit",
    offload: Offload = "none",
    workspace_mb: Workspace = 64,
    resume: Resume = False,
    plain: Plain = False,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Fine-tune a causal language model on text, prompt/completion or chat records."""
    values = locals()
    kept = None if full or quantize == "none" else quantize
    names = target_names(target_modules)
    config = FinetuneConfig(**pick(FinetuneConfig, values, quantize=kept, target_modules=names))
    config.check()
    load_operators()
    from shoestring.cli.finetune import finetune as run
    from shoestring.training.run import RunOptions

    own = RunOptions(out, resume, checkpoint_every, threads, memory_budget, offload, trust_remote_code)
    finish(run(config, own, data, glob, merge), out)


@app.command()
def estimate(
    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face model directory or config.json (no weights are read), or a preset of train."
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of a preset's vocabulary.", callback=within(1, (1 << 31) - 1))
    ] = 16384,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, lion, sgd, ademamix, schedule-free-adamw, lamb, adafactor, came; muon with adamw.",
            callback=one_of(*OPTIMIZERS),
        ),
    ] = "adamw",
    state: Annotated[
        str, typer.Option(help="8bit, 4bit, bf16 or fp32: how moments are kept.", callback=one_of(*STATES))
    ] = "8bit",
    weights: Annotated[
        str,
        typer.Option(
            help="plain, stochastic or remainder, how bf16 weights are kept.", callback=one_of(*WEIGHTS)
        ),
    ] = "plain",
    offload: Offload = "none",
    device: Annotated[
        str,
        typer.Option(help="cuda, or cpu, where device and host are one memory.", callback=one_of(*DEVICES)),
    ] = "cuda",
    dtype: Annotated[
        str,
        typer.Option(
            help="bf16, fp16 or fp32: of the model's weights and activations.",
            callback=one_of(*ESTIMATE_DTYPES),
        ),
    ] = "bf16",
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 2048,
    accumulate: Accumulate = 1,
    step_in_backward: Annotated[
        bool,
        typer.Option("--step-in-backward", help="Each parameter is stepped once its gradient is complete."),
    ] = False,
    gradient_checkpointing: Checkpointing = False,
    memory_budget: MemoryBudget = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Train adapters of this rank; by default all weights.", callback=RANK),
    ] = None,
    quantize: Annotated[
        str,
        typer.Option(
            help="nf4, int4, int8 or none: frozen weights, with --rank.", callback=one_of(*QUANTIZE)
        ),
    ] = "none",
    target_modules: Annotated[
        str, typer.Option(help="all-linear, or names separated by commas.")
    ] = "all-linear",
    workspace_mb: Workspace = 64,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Say what training a model holds on the device, the host and a disk, and what a step moves between them."""
    values = locals()
    names = target_names(target_modules)
    load_operators()
    from shoestring.cli.estimate import Request, options_of, run
    from shoestring.training.estimate import Options

    own = pick(Options, values)
    for name in ("offload", "memory_budget"):
        own.pop(name)
    options = options_of(own, dtype, offload, memory_budget)
    run(Request(**pick(Request, values, target_modules=names)), options, as_json)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Annotated[str, typer.Option(help="Hugging Face model directory, or an id of the Hub.")],
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter directory to put on the model.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens to write.", callback=within(1, 10**6))
    ] = 100,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", callback=within(0, 1000, "0 or more"))
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw among the likeliest tokens of this total probability.",
            callback=within(0, 1, "more than 0, at most 1", without=0),
        ),
    ] = 0.95,
    seed: Seed = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the chat template.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a prompt with a model, and an adapter if given."""
    load_operators()
    from shoestring.cli.generate import Sampling
    from shoestring.cli.generate import generate as run

    with contextlib.redirect_stdout(sys.stderr):  # only the generated text goes to stdout
        text = run(
            model,
            adapter,
            prompt,
            Sampling(max_new_tokens, temperature, top_p, seed),
            chat,
            trust_remote_code,
        )
    print(text)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of finished runs; ratios are to the first.")
    ],
    out: Annotated[Path, typer.Option(help="Where compare.html and compare.png go.")] = Path("."),
) -> None:
    """Put finished runs side by side: a table, and curves, memory and speed in compare.html."""
    from shoestring.cli.console import print_table
    from shoestring.training.report import write_comparison

    if not out.is_dir():
        raise InputError(f"--out {out}: no such directory")
    print_table(write_comparison(runs, out))
    print(f"report: {out / 'compare.html'}")


@app.command()
def tokenize(
    data: Data,
    out: Annotated[Path, typer.Option(help="Token file to write.")],
    glob: Glob = "*",
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory to use.")] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Train a BPE tokenizer of this size on the data instead.", callback=VOCABULARY),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write text as one flat file of tokens, which the C++ examples read too."""
    from shoestring.cli.tokenize import tokenize as run

    print(f"{run(data, glob, out, tokenizer, vocab_size, trust_remote_code):,} tokens in {out}")


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for data, runs and the report; a demo there is replaced.")
    ] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Steps of each training run.", callback=within(1, COUNT))] = 60,
    finetune_steps: Annotated[
        int, typer.Option(help="Steps of each fine-tuning run.", callback=within(1, COUNT))
    ] = 24,
) -> None:
    """Train and fine-tune a small model on text of this machine, each beside plain PyTorch, and compare."""
    from shoestring.cli.demo import demo as run

    run(out, steps, finetune_steps)


def load_operators() -> None:
    """Import PyTorch and register the operators, after all checks of options that do not need them.

    Raises:
        InputError: the libraries are not built, or were built for another PyTorch.
    """
    try:
        importlib.import_module("shoestring._public")
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise InputError(error) from None


def pick(config: type[Any], values: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the options that are fields of ``config``, updated with ``changed``."""
    return {
        **{name: value for name, value in values.items() if name in config.__dataclass_fields__},
        **changed,
    }


def finish(summary: dict[str, Any], out: Path) -> None:
    """Print the result of a run and the path of its report."""
    from shoestring.cli.console import gigabytes

    val = f", validation loss {summary['val_loss']:.3f}" if summary["val_loss"] is not None else ""
    print(
        f"loss {summary['train_loss']:.3f}{val}, {summary['tokens_per_second']:,.0f} tokens/s, "
        f"peak memory {gigabytes(summary['peak_memory'])}; report: {out / 'report.html'}"
    )


def spread(argv: list[str]) -> list[str]:
    """Repeat `--data` before each of several files, so that a shell pattern works: `--data *.txt`."""
    arguments: list[str] = []
    listing = False
    for argument in argv:
        if argument.startswith("-"):
            listing = argument == "--data"
        elif listing and arguments[-1] != "--data":
            arguments.append("--data")
        arguments.append(argument)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0, 2 for input that cannot be used, 130 for Ctrl-C or 143 for SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        # escape characters that the terminal's encoding cannot represent
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    arguments = spread(sys.argv[1:] if argv is None else argv)
    try:
        with handled():
            for argument in arguments:
                if not is_utf8(argument):
                    raise InputError(
                        f"argument {argument!a}: expected UTF-8; rename the file or convert the text"
                    )
            result = command.main(args=arguments, prog_name="shoestring", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except Interrupted as error:
        print(f"shoestring: {error}", file=sys.stderr)
        return 128 + error.number
    except Exception as error:
        # typer's exception for an abort at a prompt
        if hasattr(error, "exit_code") and not hasattr(error, "format_message"):
            return int(error.exit_code)
        message = reason(error)
        if message is None:
            raise
    print(f"shoestring: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def reason(error: Exception) -> str | None:
    """Describe an error that the user can correct; return None for any other error."""
    if isinstance(error, InputError):
        return str(error)
    if hasattr(error, "format_message"):  # a usage error: unknown option, missing argument, wrong type
        return str(error.format_message())
    disk = disk_error(error)
    if disk is not None:
        return f"{disk.filename or 'writing'}: {disk.strerror}; what was complete before is kept"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    # PyTorch's CPU allocator raises a plain RuntimeError, so its message has to be compared.
    if (
        isinstance(error, MemoryError)
        or "not enough memory" in str(error)
        or type(error).__name__ == "OutOfMemoryError"
    ):
        detail = str(error).partition("\n")[0]
        return f"out of memory{f' ({detail})' if detail else ''}; take a smaller --batch-size, --seq-len or model"
    return None

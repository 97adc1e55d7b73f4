"""Commands and their options. An error that the user can correct is printed in one line, with exit code 2."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.cli.config import GenerateConfig, RunFolder, Source
from shoestring.cli.expand_settings import expand_settings
from shoestring.core.errors import InputError, is_utf8, printable
from shoestring.files.atomic import disk_error
from shoestring.training.config import FinetuneConfig, PlanConfig, TrainConfig
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.options import COUNT, VOCABULARY, Device, HostAllocator, TrustRemoteCode, number
from shoestring.training.run.signals import Interrupted, handled

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def shoestring() -> None:
    """Train and fine-tune language models in little memory."""


@app.command()
@expand_settings
def train(source: Source, out: RunFolder, config: TrainConfig) -> None:
    """Train a Llama-architecture model from scratch on text."""
    load_operators()
    from shoestring.cli.train import train as run

    finish(run(config, source, out), out)


@app.command()
@expand_settings
def finetune(source: Source, out: RunFolder, config: FinetuneConfig) -> None:
    """Fine-tune a causal language model on text, prompt/completion or chat records."""
    load_operators()
    from shoestring.cli.finetune import finetune as run

    finish(run(config, source, out), out)


@app.command()
@expand_settings
def plan(
    source: Source,
    config: PlanConfig,
    plot: Annotated[Path | None, typer.Option(help="Image of memory against speed to write.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File of the plan, which C++ reads, too.")
    ] = None,
) -> None:
    """Measure a fine-tuning, and print its fastest plan within --device-memory; nothing is trained."""
    load_operators()
    from shoestring.cli.plan import plan as run

    run(config, source, plot, as_json)


@app.command()
@expand_settings
def estimate(
    config: EstimateConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all sizes in bytes.")] = False,
) -> None:
    """Estimate the memory of training on device, host and disk, and the bytes that a step moves."""
    load_operators()
    from shoestring.cli.estimate import run

    run(config, as_json)


@app.command()
@expand_settings
def generate(config: GenerateConfig) -> None:
    """Continue a prompt with a model, and an adapter if given."""
    load_operators()
    from shoestring.cli.generate import generate as run

    with contextlib.redirect_stdout(sys.stderr):  # only the generated text goes to stdout
        text = run(config)
    # a model may have learnt to write what a terminal acts on
    print(printable(text) if sys.stdout.isatty() else text)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of finished runs; ratios are to the first.")
    ],
    out: Annotated[Path, typer.Option(help="Where compare.html and compare.png go.")] = Path("."),
) -> None:
    """Compare finished runs: print a table, and write curves, memory and speed to compare.html."""
    from shoestring.cli.console import print_table
    from shoestring.training.report.write import write_comparison

    if not out.is_dir():
        raise InputError(f"--out {out}: no such directory")
    print_table(write_comparison(runs, out))
    print(f"report: {out / 'compare.html'}")


@app.command()
@expand_settings
def tokenize(
    source: Source,
    out: Annotated[Path, typer.Option(help="Token file to write.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory to use.")] = None,
    vocab_size: Annotated[
        int | None, number(*VOCABULARY, help="Train a BPE tokenizer of this size on the data instead.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write text as one flat file of tokens, which the C++ examples read too."""
    from shoestring.cli.tokenize import tokenize as run

    print(f"{run(source, out, tokenizer, vocab_size, trust_remote_code):,} tokens in {out}")


@app.command(context_settings={"allow_interspersed_args": False})
def monitor(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, best after `--`.")],
    interval: Annotated[float, typer.Option(help="Seconds between two samples, 0.1 to 10.")] = 0.5,
    plot: Annotated[Path | None, typer.Option(help="Image of the measurements to write.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="JSON file of the report to write.")] = None,
    live: Annotated[
        bool, typer.Option(help="Show measurements while the program runs, on a terminal.")
    ] = True,
) -> int:
    """Run a program, measure it and its children, and name the bottleneck. Its exit code is passed on."""
    from shoestring.cli.monitor import run

    return run(command, interval, plot, as_json, live)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for data, runs and the report; a demo there is replaced.")
    ] = Path("runs/demo"),
    steps: Annotated[int, number(1, COUNT, help="Steps of each training run.")] = 36,
    finetune_steps: Annotated[int, number(1, COUNT, help="Steps of each fine-tuning run.")] = 16,
    device: Device = "auto",
    host_allocator: HostAllocator = None,
) -> None:
    """Train and fine-tune a small model on text of this machine; compare shoestring with plain PyTorch."""
    from shoestring.cli.demo import demo as run

    run(out, steps, finetune_steps, device, host_allocator)


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


def finish(summary: dict[str, Any], out: Path) -> None:
    """Print the result of a run and the path of its report; nothing in the other processes of a run."""
    if not summary:
        return
    from shoestring.cli.console import gigabytes

    val = f", validation loss {summary['val_loss']:.3f}" if summary["val_loss"] is not None else ""
    print(
        f"loss {summary['train_loss']:.3f}{val}, {summary['tokens_per_second']:,.0f} tokens/s, "
        f"peak memory {gigabytes(summary['peak_memory'])}; report: {out / 'report.html'}"
    )


def spread(argv: list[str]) -> list[str]:
    """Repeat `--data` before each of several files, so that a shell pattern works: `--data *.txt`."""
    if argv[:1] == ["monitor"]:  # the arguments are those of another program
        return argv
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
    print(f"shoestring: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _usage(error: Any) -> str:
    """Describe an error of the parser; of text that is no number, as the checks of single values do."""
    text = str(error.format_message())
    option = getattr(error, "param", None)
    number = re.search(r"valid (number|float|integer)", text)
    if option is None or number is None:
        return text
    expected = "an integer" if number[1] == "integer" else "a number"
    return f"{option.opts[0]}: expected {expected}{_received(error, text)}"


def _received(error: Any, text: str) -> str:
    """Return the end of a message with the value that is no number, which versions of typer keep in different places."""
    details = getattr(error.__context__, "errors", None)
    quoted = re.search(r"'(.*)' is not a valid", text, re.DOTALL)
    value = str(details()[0]["input"]) if details is not None else quoted[1] if quoted else ""
    return f", got {value if len(value) <= 80 else value[:77] + '...'}" if value else ""


def reason(error: Exception) -> str | None:
    """Describe an error that the user can correct; return None for any other error."""
    if isinstance(error, InputError):
        return str(error)
    if hasattr(error, "format_message"):  # a usage error: unknown option, missing argument, wrong type
        return _usage(error)
    disk = disk_error(error)
    if disk is not None:
        # The text of another error may name the file.
        why = disk.strerror if isinstance(error, OSError) or disk.filename else str(error).partition("\n")[0]
        return f"{disk.filename or 'writing'}: {why}; what was complete before is kept"
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):  # a collective of torch.distributed
        return f"{str(error).splitlines()[0]}; start the processes again with --resume"
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

"""Write what docs/choosing.md and docs/guides/choosing_processes.md show of plans and estimates.

    python scripts/choosing_tables.py --write

Without --write, print the pages that differ and exit with status 1. A test does the same. Tables are what
`shoestring estimate` prints. A block of text that follows a block of Python is what the Python prints.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from typer.testing import CliRunner

from shoestring.cli.app import app
from shoestring.cli.estimate import build, check
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.ranks import Choice, choose

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHOOSING, PROCESSES = DOCS / "choosing.md", DOCS / "guides/choosing_processes.md"
LLAMA_8B = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096,
    intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    tie_word_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """A row of the decisions: the parameters, the place, and the options of its command."""

    size: str
    place: str
    options: str


ESTIMATE = "estimate --vocab-size 32000 --precision bf16 --device cuda --batch-size 1 --seq-len 2048"
TRAINED = {
    "QLoRA, rank 16, recompute": "--rank 16 --quantize nf4 --activations recompute",
    "the same with int8 weights": "--rank 16 --quantize int8 --activations recompute",
    "LoRA over bf16 weights, rank 16, recompute": "--rank 16 --quantize none --activations recompute",
    "QLoRA, rank 16, activations kept": "--rank 16 --quantize nf4",
    "QLoRA, rank 16, weights on a disk, recompute": "--rank 16 --quantize nf4 --offload-weights nvme:/swap --activations recompute",
    "all weights in bf16, state on a disk (4 bits), steps in backward, recompute":
        "--full --weights bf16-stochastic --optimizer-state 4bit --offload nvme:/swap --step-in-backward --activations recompute",
    "all weights in bf16 with remainder, steps on the CPU, recompute":
        "--full --weights bf16-remainder --offload cpu --step-in-backward --activations recompute",
    "all weights in bf16, 8-bit state, steps in backward, recompute":
        "--full --weights bf16-stochastic --step-in-backward --activations recompute",
    "all weights in bf16, 8-bit state, recompute": "--full --weights bf16-stochastic --activations recompute",
    "all weights in bf16 with remainder, 8-bit state, recompute":
        "--full --weights bf16-remainder --activations recompute",
    "all weights in fp32, fp32 state, recompute": "--full --optimizer-state fp32 --activations recompute",
}  # fmt: skip
DECISIONS = [
    Decision("1.1 B", "8 GPUs of a machine", "--world 8 --link 400GB/s,5us --memory 24GB"),
    Decision("1.1 B", "8 GPUs of 6 GB", "--world 8 --link 25GB/s,10us --memory 6GB"),
    Decision("1.1 B", "8 GPUs of 4 GB", "--world 8 --link 25GB/s,10us --memory 4GB"),
    Decision("1.1 B", "8 machines, Ethernet", "--world 8 --link 10Gbit,50us --memory 24GB"),
    Decision("1.1 B", "8 homes", "--world 8 --link 100Mbit,30ms --memory 24GB"),
    Decision("8 B", "8 GPUs of 80 GB", "--world 8 --link 400GB/s,5us --memory 80GB"),
    Decision("8 B", "8 GPUs of 48 GB", "--world 8 --link 25GB/s,10us --memory 48GB"),
    Decision("8 B", "8 GPUs of 24 GB", "--world 8 --link 25GB/s,10us --memory 24GB"),
    Decision(
        "8 B", "8 machines of 8 GPUs of 24 GB",
        "--world 64 --mesh 8x8 --link 50Gbit,10us --inner-link 400GB/s,5us --memory 24GB",
    ),
]  # fmt: skip
LINKS = ["100Mbit,30ms", "1Gbit,30ms", "400Gbit,5us"]
WAYS = {
    "whole gradients, fp32": "--parallel ddp",
    "8 bits": "--parallel ddp --compress 8bit",
    "4 bits": "--parallel ddp --compress 4bit",
    "1 bit": "--parallel ddp --compress 1bit",
    "DiLoCo, every 500 steps": "--parallel diloco",
    "DiLoCo, every 500 steps, 4 bits": "--parallel diloco --compress 4bit",
}


@functools.cache
def model_of(model: str, weights: str) -> nn.Module:
    return build(
        EstimateConfig(
            model=model, vocab_size=32000, precision="bf16", weights=weights, seq_len=2048, full=True
        )
    )


def chosen(model: str, weights: str, options: str) -> Choice:
    """Return what the command with these options estimates. The model is built once."""
    words = options.split()
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    config = EstimateConfig(
        model=model, vocab_size=32000, precision="bf16", weights=weights, activations="recompute", batch_size=1, seq_len=2048, device="cuda",
        world=int(given.pop("world")), **given,  # type: ignore[arg-type]
    )  # fmt: skip
    check(config)
    return choose(model_of(model, weights), config)


def table(heading: list[str], rows: list[list[str]], right: int) -> str:
    """Return a table in Markdown, whose last columns are aligned to the right."""
    rule = ["---"] * (len(heading) - right) + ["---:"] * right
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, rule, *rows])


def seconds(value: float | None) -> str:
    assert value is not None
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def decisions(models: dict[str, str]) -> str:
    rows = []
    for each in DECISIONS:
        choice = chosen(models[each.size], "bf16-stochastic", each.options)
        best = choice.chosen
        others = ", ".join(
            f"{other.strategy} {other.bytes / 1e9:.1f} GB {seconds(other.link_seconds)} s"
            for other in choice.compared
            if other is not best
        )
        rows.append(
            [each.size, each.place, f"`{each.options}`", f"`{best.strategy}`", f"{best.bytes / 1e9:.1f}",
             f"{best.sent / 1e9:.2f}", seconds(best.link_seconds), others]
        )  # fmt: skip
    heading = ["model", "where", "options", "choice", "GB", "GB sent", "link, s", "the others"]
    return table(heading, rows, 0)


def internet(models: dict[str, str]) -> str:
    rows = []
    for size, model in models.items():
        for name, options in WAYS.items():
            found = [chosen(model, "fp32", f"--world 8 {options} --link {link}").chosen for link in LINKS]
            sent = f"{found[0].sent / 1e9:.3g}"
            rows.append([size, name, f"`{options}`", sent, *(seconds(each.link_seconds) for each in found)])
    return table(["model", "way", "options", "GB sent", *(f"`{link}`" for link in LINKS)], rows, 4)


def estimated(model: str, options: str) -> str:
    """Return what the command prints."""
    result = CliRunner().invoke(app, [*ESTIMATE.split(), "--model", model, *options.split()])
    assert result.exit_code == 0, result.output
    return result.stdout


def memory(models: Mapping[str, str]) -> str:
    def places(model: str, options: str) -> str:
        totals: dict[str, int] = json.loads(estimated(model, f"{options} --json"))["totals"]
        device = totals.pop("device")
        away = [f"{place} {size / 1e9:.2f}" for place, size in totals.items() if size]
        return ", ".join([f"{device / 1e9:.2f}", *away])

    rows = [
        [name, f"`{options}`", *(places(model, options) for model in models.values())]
        for name, options in TRAINED.items()
    ]
    return table(["what is trained, and how", "options", *models], rows, 0)


def answers(text: str) -> str:
    """Return a page whose blocks of text are what the blocks of Python before them print.

    The blocks run in one namespace, with one thread, as operators on the CPU take memory for each.
    """
    names: dict[str, Any] = {"__name__": "__main__"}

    def answered(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(match[1], names)
        said = printed.getvalue()
        assert bool(said) == bool(match[2]), f"expected a block of text after code that prints:\n{match[1]}"
        return f"```python\n{match[1]}```\n" + (f"```text\n{said}```\n" if said else "")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return re.sub(r"```python\n(.*?)```\n(```text\n.*?```\n)?", answered, text, flags=re.S)
    finally:
        torch.set_num_threads(threads)


def with_tables(page: Path, tables: Mapping[str, str]) -> str:
    """Return the text of a page with these tables between its markers."""
    text = page.read_text()
    for name, made in tables.items():
        text, count = re.subn(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)",
            lambda m, made=made: f"{m[1]}{made}\n{m[2]}",
            text,
            flags=re.S,
        )
        assert count == 1, f"{page}: {name}"
    return text


def choosing() -> str:
    """Return docs/choosing.md as it is computed now."""
    with named_models() as models:
        sample = estimated(models["8 B"], next(iter(TRAINED.values())))
        tables = {"memory": memory(models), "estimate": f"```text\n{sample}```"}
    return answers(with_tables(CHOOSING, tables))


def processes() -> str:
    """Return docs/guides/choosing_processes.md as it is computed now."""
    with named_models() as models:
        text = with_tables(PROCESSES, {"decisions": decisions(models), "internet": internet(models)})
    model_of.cache_clear()
    return text


@contextlib.contextmanager
def named_models() -> Iterator[dict[str, str]]:
    """Yield the value of --model of the models of all tables: a preset, and the path of a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_8B))
        yield {"1.1 B": "1b", "8 B": str(config)}


def main(write: bool = False) -> None:
    differs = False
    for page, text in ((CHOOSING, choosing()), (PROCESSES, processes())):
        if write:
            page.write_text(text)
        elif text != page.read_text():
            print(text)
            differs = True
    sys.exit(differs)


if __name__ == "__main__":
    typer.run(main)

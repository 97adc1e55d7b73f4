"""Write the tables of docs/guides/choosing_processes.md, whose rows are what `shoestring estimate --world` prints.

    python scripts/processes_tables.py --write

Without --write, print the page and exit with status 1 if it differs. A test does the same.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import typer
from torch import nn

from shoestring.cli.estimate import build, check
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.ranks import Choice, choose

PAGE = Path(__file__).resolve().parents[1] / "docs/guides/choosing_processes.md"
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
    return table(heading, [[*row[:4], *row[4:]] for row in rows], 0)


def internet(models: dict[str, str]) -> str:
    rows = []
    for size, model in models.items():
        for name, options in WAYS.items():
            found = [chosen(model, "fp32", f"--world 8 {options} --link {link}").chosen for link in LINKS]
            sent = f"{found[0].sent / 1e9:.3g}"
            rows.append([size, name, f"`{options}`", sent, *(seconds(each.link_seconds) for each in found)])
    return table(["model", "way", "options", "GB sent", *(f"`{link}`" for link in LINKS)], rows, 4)


def page() -> str:
    """Return the page with tables that are computed now."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_8B))
        models = {"1.1 B": "1b", "8 B": str(config)}
        text = PAGE.read_text()
        for name, made in (("decisions", decisions(models)), ("internet", internet(models))):
            text = re.sub(
                rf"(<!-- table: {name} -->\n).*?(<!-- end -->)",
                lambda m, made=made: f"{m[1]}{made}\n{m[2]}",
                text,
                flags=re.S,
            )
        model_of.cache_clear()
    return text


def main(write: bool = False) -> None:
    text = page()
    if write:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        print(text)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)

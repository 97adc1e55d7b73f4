"""Compare low-memory optimizer states and 16-bit weights by training the same small GPT with each.

A Llama of 0.7 M parameters learns the source of Python's standard library, as in `shoestring demo`. For each
seed, all variants start from the same initial weights and see the same batches. The table shows each
variant's mean validation loss over the seeds, and its difference from the variant in fp32. Weights that are
stored in 16 bits are converted to fp32 for the matrix products, so these are in fp32 for all variants.

The first command below trains all runs, one after the other, and continues unfinished runs. The second
command prints the table of the finished runs. The third trains the model of `shoestring demo` as the demo does,
with 8 seeds: with fp32 state, and with the 8-bit states of shoestring and of bitsandbytes.

    python -m benchmarks.optim.train_optimizers --out FOLDER
    python -m benchmarks.optim.train_optimizers --out FOLDER --table
    python -m benchmarks.optim.train_optimizers --out FOLDER --demo
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import cpu_model
from shoestring.cli.config import Source
from shoestring.cli.demo_data import standard_library
from shoestring.cli.tokenize import tokenize
from shoestring.data.batches import Blocks, split_blocks
from shoestring.data.token_file import read_token_file
from shoestring.data.tokenizer import load_tokenizer
from shoestring.files.atomic import remove_partial, write_json
from shoestring.optim import AdamW
from shoestring.training.config import PRESETS, LoopConfig, Preset, require_equal
from shoestring.training.optimizers import decayed, trained
from shoestring.training.report.metrics import read_metrics
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint
from shoestring.training.run.folder import Run
from shoestring.training.run.loop import Trainer
from shoestring.training.run.models import build_preset, fused_loss

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Variant:
    """A combination to train with: a kind of AdamW's state, and a way to store the weights.

    With weights="master", the weights are stored in fp32 and rounded to bf16 for the matrix products.
    """

    state: str
    weights: str = "fp32"
    # maximum difference between the mean losses of this variant and of fp32, as a fraction of the latter
    limit: float | None = None
    same_as: str | None = None  # name of another variant, whose losses must equal this one's bit for bit

    def optimizer(self, groups: Iterable[Any], seed: int) -> torch.optim.Optimizer:
        if self.state == "torch":
            return torch.optim.AdamW(groups, betas=BETAS, fused=True)
        if self.state == "bitsandbytes":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(groups, betas=BETAS)
        weights = self.weights if self.weights in ("stochastic", "remainder") else "nearest"
        return AdamW(groups, betas=BETAS, state_format=self.state, weight_rounding=weights, seed=seed)


VARIANTS = {
    "torch": Variant("torch"),
    "bitsandbytes": Variant("bitsandbytes"),
    "fp32": Variant("fp32"),
    "bf16": Variant("bf16"),
    "8bit": Variant("8bit", limit=0.003),
    "4bit": Variant("4bit", limit=0.01),
    "8bit, bf16 weights, stochastic": Variant("8bit", "stochastic", limit=0.005),
    "8bit, fp32 master of bf16 weights": Variant("8bit", "master"),
    "8bit, bf16 weights, remainder": Variant(
        "8bit", "remainder", same_as="8bit, fp32 master of bf16 weights"
    ),
    "8bit, bf16 weights, to nearest": Variant("8bit", "nearest"),
}
REFERENCE = "fp32"


@dataclass(frozen=True)
class Task:
    """A task is a model, the size of its vocabulary, and the settings of its runs."""

    shape: Preset
    vocabulary: int
    config: LoopConfig
    variants: tuple[str, ...]
    seeds: int  # number of seeds
    is_fused: bool = False  # whether the loss is shoestring's; the weights have to be stored in fp32


# Gradients are not clipped: their norms in bf16 and in fp32 differ.
LONG = Task(
    Preset(hidden=128, layers=2, heads=4, kv_heads=4, mlp=384),
    2048,
    LoopConfig(
        seq_len=64,
        batch_size=8,
        steps=2000,
        lr=1.5e-3,
        warmup=100,
        clip=0.0,
        eval_batches=64,
        precision="fp32",
    ),
    tuple(name for name in VARIANTS if name != "bitsandbytes"),
    seeds=3,
)
# As shoestring/cli/demo.py trains.
DEMO = Task(
    PRESETS["mini"],
    16384,
    LoopConfig(seq_len=512, batch_size=16, steps=36, lr=4e-3, eval_batches=2, precision="fp32"),
    ("torch", "bitsandbytes", "fp32", "8bit"),
    seeds=8,
    is_fused=True,
)


def config_of(task: Task, seed: int, steps: int | None, lr: float | None) -> LoopConfig:
    """Return the settings of a run; None takes the value of the task."""
    steps, lr = steps or task.config.steps, lr or task.config.lr
    every = {"eval_every": max(1, steps // 4), "checkpoint_every": max(1, steps // 10)}
    return replace(task.config, seed=seed, steps=steps, lr=lr, **every)


class Rounded(torch.autograd.Function):
    """Round an fp32 master weight to bf16, ties away from zero, like the bf16 part with weight_rounding="remainder".

    The gradient is rounded to bf16, too, like the gradient of a bf16 weight.
    """

    @staticmethod
    def forward(ctx: Any, master: Tensor) -> Tensor:
        return (master.view(torch.int32) + 0x8000 & -0x10000).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().float()


def loss_of(model: nn.Module, variant: Variant) -> Callable[..., Tensor]:
    """Return a function that divides the summed cross-entropy by ``items``, in fp32, however the weights are stored."""
    widen: Callable[[Tensor], Tensor] = Rounded.apply if variant.weights == "master" else Tensor.float

    def loss(inputs: Tensor, labels: Tensor, items: float = 1) -> Tensor:
        weights = {name: widen(p) for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, weights, kwargs=dict(input_ids=inputs, use_cache=False))
        return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum") / items

    return loss


class Quiet:
    """A progress display that prints one line per validation."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(self, metrics: dict[str, Any]) -> None:
        if "val_loss" in metrics:
            print(
                f"{self.name}, step {metrics['step']}: validation loss {metrics['val_loss']:.4f}", flush=True
            )


def train(
    name: str, task: Task, config: LoopConfig, folder: Path, data: tuple[Blocks, Blocks], end_of_text: int
) -> None:
    """Train one run, from its newest checkpoint if there is one, and write its result.json."""
    variant, seed, steps = VARIANTS[name], config.seed, config.steps
    run = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    if (run / "result.json").is_file():
        return
    run.mkdir(parents=True, exist_ok=True)
    remove_partial(run / "checkpoints")
    torch.manual_seed(seed)
    model = build_preset(task.shape, task.vocabulary, config.seq_len, end_of_text)
    if variant.weights != "fp32":  # with weights="master", training also starts from values rounded to bf16
        for p in model.parameters():
            p.data = p.data.bfloat16().to(p.dtype if variant.weights == "master" else torch.bfloat16)
    groups = decayed([{"params": trained(model)}], config.weight_decay)
    optimizer = variant.optimizer(groups, seed)
    loss = fused_loss(model, config.workspace_mb) if task.is_fused else loss_of(model, variant)
    fingerprint = config.fixed() | {"variant": name}
    trainer = Trainer(
        Run(config, "train", run, fingerprint=fingerprint), model, loss, *data, Quiet(f"{name}, seed {seed}")
    )
    trainer.optimizers = [optimizer]
    start = 0
    if existing := checkpoints(run):
        state = load_checkpoint(existing[-1], model, [optimizer])
        require_equal(fingerprint, state["fingerprint"], str(run))
        start, trainer.val_loss, trainer.best_val_loss = (
            state["step"],
            state["val_loss"],
            state["best_val_loss"],
        )
    trainer.fit(start)
    rows = read_metrics(run / "metrics.jsonl")
    losses = hashlib.sha256(b"".join(row["loss"].hex().encode() for row in rows)).hexdigest()
    write_json(run / "result.json", dict(
        variant=name, seed=seed, steps=steps, lr=config.lr, val_loss=trainer.val_loss, losses_sha256=losses,
        parameters=sum(p.numel() for p in model.parameters()), seconds=sum(row["seconds"] for row in rows),
        machine=cpu_model(), capability=torch.ops.shoestring._cpu_capability(), torch=torch.__version__,
    ))  # fmt: skip


def results(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the contents of all result.json files by variant and seed, in the order of VARIANTS."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in VARIANTS}
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text())
        found[result["variant"]][result["seed"]] = result
    return {name: runs for name, runs in found.items() if runs}


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Return a Markdown table. A variant is compared with fp32 over the seeds that both have finished."""
    lines = [
        "| state and weights | validation loss, mean of the seeds | over fp32: mean, standard deviation | seed by seed | limit |"
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    reference = found.get(REFERENCE, {})
    for name, runs in found.items():
        variant, seeds = VARIANTS[name], [seed for seed in runs if seed in reference]
        if not seeds:
            continue
        mean, base = (statistics.mean(of[s]["val_loss"] for s in seeds) for of in (runs, reference))
        ratios = [runs[s]["val_loss"] / reference[s]["val_loss"] - 1 for s in seeds]
        each = ", ".join(f"{ratio:+.2%}" for ratio in ratios)
        spread = f"{mean / base - 1:+.2%}" + (f", {statistics.stdev(ratios):.2%}" if len(ratios) > 1 else "")
        limit = ""
        if variant.limit is not None:
            limit = f"{variant.limit:.1%}: {'kept' if mean / base - 1 <= variant.limit else '**missed**'}"
        if variant.same_as in found:
            twin = found[variant.same_as]
            same = all(
                runs[s][key] == twin[s][key]
                for s in runs
                if s in twin
                for key in ("losses_sha256", "val_loss")
            )
            limit = f"every loss bitwise that of {variant.same_as}: {'kept' if same else '**missed**'}"
        lines.append(f"| {name} | {mean:.4f} | {spread} | {each} | {limit} |")
    return "\n".join(lines)


def prepare(folder: Path, task: Task) -> tuple[tuple[Blocks, Blocks], int]:
    """Tokenise Python's standard library, the text of the demo.

    Returns:
        ((training blocks, validation blocks), id of the end-of-text token).
    """
    tokens = folder / "tokens.bin"
    if not tokens.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        standard_library(folder / "stdlib.jsonl")
        tokenize(Source(data=[folder / "stdlib.jsonl"]), tokens, None, task.vocabulary)
    data = split_blocks(read_token_file(tokens)[0], task.config.seq_len, 0.02)
    return data, load_tokenizer(folder / "tokens-tokenizer").eos_token_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the runs; those there are continued"
    )
    parser.add_argument("--demo", action="store_true", help="train as `shoestring demo` does")
    parser.add_argument("--steps", type=int, help="2000, or 36 as the demo")
    parser.add_argument("--lr", type=float, help="at the peak; the default suits fp32")
    parser.add_argument("--threads", type=int, default=1, help="a run's bits depend on it")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", help="0, 1 and 2, or 0 to 7 with --demo")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = DEMO if options.demo else LONG
    if not options.table:
        data, end_of_text = prepare(options.out / "data", task)
        for seed in options.seeds or range(task.seeds):
            for name in options.variants or task.variants:
                config = config_of(task, seed, options.steps, options.lr)
                train(name, task, config, options.out, data, end_of_text)
    found = results(options.out)
    write_json(options.out / "results.json", found)
    print(table(found))


if __name__ == "__main__":
    main()

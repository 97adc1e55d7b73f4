"""Train a small Llama on Python's standard library with WSD, Muon, a guard and averages, or with plain AdamW.

    python examples/python/small_llama.py                     # the recipe, 300 steps
    python examples/python/small_llama.py --recipe adamw      # PyTorch's AdamW with a cosine, to compare

The recipe: Muon for matrices and 8-bit AdamW for the other weights; rates that warm up, stay and decay (WSD); a guard
that skips steps whose loss or gradients are bad; an exponential average of the weights, which is evaluated as well.

The run is saved to --run and continued with --resume, bit for bit. The C++ program examples/cpp/small_llama takes the same
steps with the same options, and continues the runs of this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from common import Parser, count
from torch import Tensor, nn

import shoestring
from shoestring.callbacks import Callbacks, OnStep, Run
from shoestring.optim import AdamW, Averages, Guard, Muon, schedules

HEADER_BYTES = 64  # of a token file
VOCAB = 4096
VALIDATION_BLOCKS = 64  # the last blocks of the file


class Block(nn.Module):
    """A block of Llama: attention and a gated MLP, each with a norm before and a residual around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = shoestring.nn.RMSNorm(width)
        self.self_attn = shoestring.nn.Attention(width, heads, num_kv_heads=heads // 2, causal=True)
        self.post_attention_layernorm = shoestring.nn.RMSNorm(width)
        self.mlp = shoestring.nn.GatedMLP(width, 3 * width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos=cos, sin=sin)
        normed, x = self.post_attention_layernorm.forward_with_residual(attended, x)
        return x + self.mlp(normed)


class Llama(nn.Module):
    """A Llama whose output matrix is the embedding. ``forward`` returns the mean loss of the tokens."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = shoestring.nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        shoestring.nn.init.depth_scaled_(self, ["*.o_proj.weight", "*.down_proj.weight"], layers)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of rows (batch, tokens + 1): each token is predicted from those before it."""
        tokens = rows.shape[1] - 1
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=rows.device) / self.head_dim
        angle = torch.outer(torch.arange(tokens, dtype=torch.float32, device=rows.device), 10000**-exponent)
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(rows[:, :-1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return shoestring.linear_cross_entropy(self.norm(x), self.embed_tokens.weight, rows[:, 1:])


@dataclass(frozen=True)
class Data:
    """A file of `shoestring tokenize` in blocks of ``seq_len`` tokens. The last blocks are for validation."""

    tokens: np.ndarray
    vocab: int
    seq_len: int

    @property
    def blocks(self) -> int:
        """The number of blocks for training."""
        return (len(self.tokens) - 1) // self.seq_len - VALIDATION_BLOCKS

    def rows(self, numbers: list[int]) -> Tensor:
        """Return blocks, each with the token that follows it: int64 (blocks, seq_len + 1)."""
        found = [self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in numbers]
        return torch.from_numpy(np.stack(found).astype(np.int64))

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """Return the rows of a step. Each pass over the data has a permutation of its own."""
        numbers, order, known = [], torch.empty(0), -1
        for position in range(step * size, (step + 1) * size):
            if position // self.blocks != known:
                known = position // self.blocks
                generator = torch.Generator().manual_seed(seed * 1_000_003 + known)
                order = torch.randperm(self.blocks, generator=generator)
            numbers.append(int(order[position % self.blocks]))
        return self.rows(numbers)

    def validation(self, size: int) -> list[Tensor]:
        numbers = range(self.blocks, self.blocks + VALIDATION_BLOCKS)
        return [self.rows(list(numbers[i : i + size])) for i in range(0, VALIDATION_BLOCKS, size)]


def read_tokens(path: Path, seq_len: int) -> Data:
    """Read a token file. Without the file, write the tokens of Python's standard library to it first."""
    if not path.exists():
        root = Path(sysconfig.get_path("stdlib"))
        left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        files = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
        files = [p for p in files if p.stat().st_size > 0]
        command = [sys.executable, "-m", "shoestring", "tokenize", "--vocab-size", str(VOCAB)]
        done = subprocess.run([*command, "--out", str(path), "--data", *map(str, files)])
        if done.returncode != 0:
            stop(f"--data {path}: `shoestring tokenize` failed")
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    if head[:8] != b"shoetok\1":
        stop(f"--data {path}: expected a file of `shoestring tokenize`, got another")
    vocab, width = np.frombuffer(head[8:16], np.uint32)
    data = Data(np.memmap(path, f"<u{width}", "r", HEADER_BYTES), int(vocab), seq_len)
    if data.blocks < 1:
        stop(
            f"--data {path}: expected more than {VALIDATION_BLOCKS} blocks of --seq-len {seq_len}, got fewer"
        )
    return data


def stop(message: str) -> NoReturn:
    """End the program with one line about a wrong input."""
    print(f"small_llama.py: error: {message}", file=sys.stderr)
    sys.exit(2)


@torch.no_grad()
def evaluate(model: Llama, batches: list[Tensor]) -> float:
    """Return the mean loss of the validation blocks."""
    return sum(model(rows).item() * len(rows) for rows in batches) / VALIDATION_BLOCKS


class Recipe:
    """Muon and 8-bit AdamW, rates by WSD, a guard and an average, and their state in one file.

    With ``plain``, it is PyTorch's AdamW with a cosine, without a guard and an average.
    """

    def __init__(self, model: Llama, o: argparse.Namespace) -> None:
        self.model, plain = model, o.recipe == "adamw"
        hidden = [p for p in model.layers.parameters() if p.dim() == 2]
        ids = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in ids]
        self.optimizers: list[torch.optim.Optimizer] = []
        if plain:
            decayed = {"params": [p for p in model.parameters() if p.dim() == 2]}
            norms = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
            self.optimizers = [
                torch.optim.AdamW([decayed, norms], lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)
            ]
            rate = schedules.cosine(o.steps, warmup=min(o.warmup, o.steps), end=0.1)
        else:
            self.optimizers = [
                Muon(hidden, lr=o.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                AdamW(others, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.0),
            ]
            rate = schedules.wsd(o.steps, warmup=min(o.warmup, o.steps), decay=0.3)
        self.averages = None if plain else Averages(model, "ema", decay=o.ema)
        self.guard = None if plain else Guard(self.optimizers, "skip", spike=6.0)
        parts: dict[str, Any] = {
            f"rate{number}": OnStep(schedules.Scheduler(optimizer, lr=rate).step)
            for number, optimizer in enumerate(self.optimizers)
        }
        if self.averages is not None:
            parts["averages"] = OnStep(self.averages.update)
        self.callbacks = Callbacks(**parts)

    def step(self, run: Run) -> None:
        """Clip the gradients, and step the optimizers, or not if the guard finds the step bad."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.guard is not None:
            self.guard.step(run.loss)
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        run.step += 1
        self.callbacks.on_step(run)

    def _parts(self) -> dict[str, Any]:
        return {"callbacks": self.callbacks} | ({} if self.guard is None else {"guard": self.guard})

    def save(self, path: Path, step: int, facts: dict[str, str]) -> None:
        shoestring.save_training(path, self.model, self.optimizers, step=step, facts=facts, **self._parts())

    def load(self, path: Path, facts: dict[str, str]) -> int:
        """Restore a run, and return the number of its steps."""
        try:
            return shoestring.load_training(
                path, self.model, self.optimizers, facts=facts, **self._parts()
            ).step
        except (OSError, ValueError) as error:
            stop(f"--resume: {error}")


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path("stdlib.tokens"), help="token file; written if it is absent"
    )
    parser.add_argument("--recipe", choices=["shoestring", "adamw"], default="shoestring")
    parser.add_argument("--run", type=Path, help="file to which the run is saved")
    parser.add_argument("--save-every", type=count, default=100, help="steps between two saves")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run")
    parser.add_argument("--until", type=count, help="last step of this process; --resume takes the others")
    parser.add_argument(
        "--json", type=Path, help="file to which the losses and times of the recipe are added"
    )
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the runs of such a file, as SVG")
    for name, default in [
        ("steps", 300),
        ("warmup", 20),
        ("batch-size", 32),
        ("seq-len", 128),
        ("layers", 6),
    ]:
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--width", type=count, default=192, help="a multiple of twice --heads")
    parser.add_argument("--heads", type=count, default=6, help="an even number")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ema", type=float, default=0.98, help="decay of the average")
    parser.add_argument("--eval-every", type=count, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=count, default=None)
    o = parser.parse_args(arguments)
    if o.width % (2 * o.heads) or o.heads % 2:
        stop(f"--width {o.width} --heads {o.heads}: expected even heads, and a width that 2 x heads divides")
    if o.resume and (o.run is None or not o.run.exists()):
        stop("--resume: expected --run FILE of an earlier run, got none")
    if o.plot is not None and not o.plot.is_file():
        stop(f"--plot {o.plot}: expected a file that --json has written, got none")
    return o


def plot(report: Path) -> None:
    """Draw the validation losses of a report into an SVG file next to it."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, rows in json.loads(report.read_text()).items():
        for key in ("validation", "average"):
            if key in rows[0]:
                label = name if key == "validation" else f"{name}, average"
                for axis, x in zip(axes, ("step", "seconds")):
                    axis.plot([row[x] for row in rows], [row[key] for row in rows], ".-", label=label)
    axes[0].set(xlabel="step", ylabel="validation loss")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend(fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "small_llama", "svg.fonttype": "none"}):
        figure.savefig(report.with_suffix(".svg"), metadata={"Date": None})


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """Train, and return the rows that were printed."""
    o = options(arguments)
    if o.plot is not None:
        plot(o.plot)
        return []
    if o.threads:
        torch.set_num_threads(o.threads)
    data = read_tokens(o.data, o.seq_len)
    torch.manual_seed(o.seed)
    model = Llama(data.vocab, o.width, o.layers, o.heads)
    recipe = Recipe(model, o)
    facts = {"data": f"{len(data.tokens)} tokens, vocabulary {data.vocab}", "steps": str(o.steps)}
    run = Run(model, recipe.optimizers, step=recipe.load(o.run, facts) if o.resume else 0)
    validation, seconds, rows = data.validation(o.batch_size), 0.0, []
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {facts['data']}", flush=True)
    last = min(o.steps, o.until or o.steps)
    while run.step < last:
        began = time.perf_counter()
        run.loss = model(data.batch(run.step, o.batch_size, o.seed))
        run.loss.backward()
        recipe.step(run)
        seconds += time.perf_counter() - began
        if run.step % o.eval_every == 0 or run.step == last:
            row = {"step": run.step, "loss": run.loss.item(), "seconds": seconds}
            row["validation"] = evaluate(model, validation)
            if recipe.averages is not None:
                with recipe.averages.swap():
                    row["average"] = evaluate(model, validation)
            rows.append(row)
            print("  ".join(f"{key} {value:.6g}" for key, value in row.items()), flush=True)
        if o.run is not None and (run.step % o.save_every == 0 or run.step == last):
            recipe.save(o.run, run.step, facts)
    if recipe.guard is not None:
        recipe.guard.check()
        print(f"{len(recipe.guard.bad_steps)} bad steps were skipped")
    if o.json is not None:
        runs = json.loads(o.json.read_text()) if o.json.exists() else {}
        o.json.write_text(json.dumps(runs | {o.recipe: rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()

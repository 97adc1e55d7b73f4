"""`shoestring train`: train a model with the Llama architecture, or its mixture of experts, from scratch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoestring.cli.config import Source
from shoestring.cli.console import Console, say, silence
from shoestring.data.batches import split_blocks
from shoestring.data.text import check_text, find_files
from shoestring.data.tokenizer import load_tokenizer, train_bpe
from shoestring.files.atomic import atomic_directory
from shoestring.training import memory
from shoestring.training.config import PRESETS, TrainConfig
from shoestring.training.run.device import weight_dtype
from shoestring.training.run.digests import file_list
from shoestring.training.run.execute import execute
from shoestring.training.run.folder import Run, begun, open_run, prepare_tokens
from shoestring.training.run.loop import Trainer
from shoestring.training.run.models import build_preset, fused_loss, parameters_of_token, plain_loss


def train(config: TrainConfig, source: Source, out: Path) -> dict[str, Any]:
    """Train from scratch and return the summary; raise InputError for input that cannot be used."""
    with open_run(config, "train", out) as run:
        return _train(run, source)


def _train(run: Run[TrainConfig], source: Source) -> dict[str, Any]:
    """Train as the options say; return the summary."""
    config = run.config
    silence(not run.processes.is_first)
    files = find_files(source.data, source.glob, say)
    check_text(files)
    tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code) if config.tokenizer else None
    run = replace(run, fingerprint=config.fixed() | {"data": file_list(files)})
    with begun(run):
        folder = run.folder / "tokenizer"
        with run.processes.in_turn():
            if folder.is_dir():
                tokenizer = load_tokenizer(folder, config.trust_remote_code)
            else:
                if tokenizer is None:
                    say(f"training a tokenizer of {config.vocab_size} tokens on {len(files)} files")
                    tokenizer = train_bpe(files, config.vocab_size)
                with atomic_directory(folder) as partial:
                    tokenizer.save_pretrained(partial)
            tokens, vocab_size = prepare_tokens(run.folder, files, tokenizer, config.seed, ("tokenizer",))
        rows = split_blocks(tokens, config.seq_len, config.val_fraction)
        memory.import_models()
        baseline = memory.in_use(run.device)
        torch.manual_seed(config.seed)
        model = build_preset(
            PRESETS[config.preset], vocab_size, config.seq_len, tokenizer.eos_token_id,
            experts=config.experts, top_k=config.experts_of_token(), dtype=weight_dtype(config.weights), device=run.device,
        )  # fmt: skip
        size = sum(p.numel() for p in model.parameters())
        if config.experts:
            say(
                f"{config.experts} experts in each of {PRESETS[config.preset].layers} layers, {config.experts_of_token()} of a "
                f"token, which uses {parameters_of_token(model) / 1e6:.1f} M parameters"
            )
        say(
            f"{size / 1e6:.1f} M parameters, vocabulary {vocab_size}, {len(tokens):,} tokens, {config.steps} steps on "
            f"{run.device}"
        )

        def save(target: Path) -> None:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)

        with Console(config.steps, config.eval_every if len(rows[1]) else 0) as console:
            loss = plain_loss(model) if config.baseline else fused_loss(model, config.workspace_mb, say)
            return execute(Trainer(run, model, loss, *rows, console), baseline, save)

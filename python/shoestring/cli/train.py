"""`shoestring train`: train a Llama-architecture model from scratch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from shoestring.cli.config import Source
from shoestring.cli.console import Console, say, silence
from shoestring.data.batches import split_blocks
from shoestring.data.text import check_text, find_files
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.data.tokenizer import load_tokenizer, train_bpe
from shoestring.files.atomic import atomic_directory
from shoestring.training import memory
from shoestring.training.config import PRESETS, Fingerprint, TrainConfig
from shoestring.training.report.write import write_report
from shoestring.training.run.device import find_device, model_dtype
from shoestring.training.run.digests import file_list, require_prepared
from shoestring.training.run.execute import check_run, execute, run_folder
from shoestring.training.run.models import build_llama, fused_loss, plain_loss
from shoestring.training.run.processes import Processes, disconnect


def train(config: TrainConfig, source: Source, out: Path) -> dict[str, Any]:
    """Train from scratch and return the summary; raise InputError for input that cannot be used."""
    processes = check_run(config, out)
    summary = _train(config, source, out, processes)
    disconnect(processes)
    return summary


def _train(config: TrainConfig, source: Source, out: Path, processes: Processes) -> dict[str, Any]:
    silence(not processes.is_first)
    files = find_files(source.data, source.glob, say)
    check_text(files)
    tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code) if config.tokenizer else None
    fingerprint = Fingerprint.of(config, data=file_list(files))
    with run_folder(config, out, "train", fingerprint, processes) as run:
        folder = run / "tokenizer"
        with processes.in_turn():
            if folder.is_dir():
                tokenizer = load_tokenizer(folder, config.trust_remote_code)
            else:
                if tokenizer is None:
                    say(f"training a tokenizer of {config.vocab_size} tokens on {len(files)} files")
                    tokenizer = train_bpe(files, config.vocab_size)
                with atomic_directory(folder) as partial:
                    tokenizer.save_pretrained(partial)
            if not (run / "tokens.bin").is_file():
                shuffled = list(files)
                random.Random(config.seed).shuffle(shuffled)
                write_token_file(run / "tokens.bin", shuffled, tokenizer)
            require_prepared(run, ["tokenizer", "tokens.bin"])
        tokens, vocab_size = read_token_file(run / "tokens.bin")
        rows = split_blocks(tokens, config.seq_len, config.val_fraction)
        memory.import_models()
        device = find_device(config.device)
        baseline = memory.in_use(device)
        torch.manual_seed(config.seed)
        model = build_llama(
            PRESETS[config.preset],
            vocab_size,
            config.seq_len,
            tokenizer.eos_token_id,
            dtype=model_dtype(config),
            device=device,
        )
        size = sum(p.numel() for p in model.parameters())
        say(
            f"{size / 1e6:.1f} M parameters, vocabulary {vocab_size}, {len(tokens):,} tokens, {config.steps} steps on {device}"
        )

        def save(target: Path) -> None:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)

        make_loss = (
            (lambda: plain_loss(model))
            if config.baseline
            else (lambda: fused_loss(model, config.workspace_mb, say))
        )
        with Console(config.steps, config.eval_every if len(rows[1]) else 0) as console:
            summary = execute(
                config,
                run,
                fingerprint,
                model,
                device,
                make_loss,
                rows,
                console,
                baseline,
                save,
                "model",
                processes=processes,
            )
        if summary:
            write_report(run)
    return summary

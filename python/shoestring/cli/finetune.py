"""`shoestring finetune`: train LoRA or QLoRA adapters, or all weights, of an existing model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoestring.cli.config import Source
from shoestring.cli.console import Console, say, silence
from shoestring.cli.places import choose_place
from shoestring.core.errors import InputError
from shoestring.data.batches import Rows, split_blocks, split_examples
from shoestring.data.chat import stop_at_answers
from shoestring.data.encoding import vocabulary_size
from shoestring.data.examples import Texts, encode_examples, read_segments
from shoestring.data.records import CHAT, TEXT, kind_of
from shoestring.data.text import check_text, find_files
from shoestring.data.tokenizer import load_tokenizer
from shoestring.files.atomic import atomic_directory
from shoestring.planning.tiles import tile_lines
from shoestring.training import memory
from shoestring.training.config import DENSE, FinetuneConfig, LoopConfig, default_format
from shoestring.training.optimizers import trained
from shoestring.training.run.adapters import apply_lora, expert_lines, merge_adapter, save_adapter, trained_to
from shoestring.training.run.device import base_dtype, weight_dtype
from shoestring.training.run.digests import file_list, model_files
from shoestring.training.run.execute import execute as execute_run
from shoestring.training.run.folder import Run, begun, open_run, prepare_tokens, recorded_plan
from shoestring.training.run.loop import Trainer
from shoestring.training.run.models import (
    Loss,
    ModelDirectory,
    can_pack,
    check_model_directory,
    fused_loss,
    load_model,
    locate_model,
    plain_loss,
)
from shoestring.training.run.positions import check_positions
from shoestring.training.run.weights import check_weights_folder, check_weights_place

Execute = Callable[[Trainer, int, Callable[[Path], None], Callable[[LoopConfig], None]], dict[str, Any]]


def finetune(
    config: FinetuneConfig, source: Source, out: Path, execute: Execute = execute_run
) -> dict[str, Any]:
    """Fine-tune and return the summary; raise InputError for input that cannot be used.

    Args:
        execute: what is done with the trainer; by default, it trains.
    """
    with open_run(config, "finetune", out) as run:
        return _finetune(run, source, execute)


def _finetune(run: Run[FinetuneConfig], source: Source, execute: Execute) -> dict[str, Any]:
    """Fine-tune as the options say; return the summary."""
    config = run.config
    silence(not run.processes.is_first)
    check_weights_place(config, run.device)
    trust = config.trust_remote_code
    folder = locate_model(config.model, trust)
    checked = check_model_directory(folder)
    check_positions(folder, checked.fields, config.seq_len)
    if config.quantize is None and not config.full:
        config = replace(config, quantize=default_format(checked.fields.get("model_type")))
        if config.quantize == "none":
            say(DENSE)
    if checked.is_quantized and (config.full or config.baseline or config.merge):
        raise InputError(
            f"--model {folder}: its weights are quantised already: expected no --full, --baseline or --merge"
        )
    asked = config

    def chosen() -> dict[str, Any]:
        former = recorded_plan(run) if config.resume and not config.replan else None
        place, tiles = choose_place(asked, str(checked.folder), run.device, former)
        return {"offload_weights": place.offload_weights, "precision": place.precision, "tiles": tiles}

    found = run.processes.from_first(chosen)
    tiles = found.pop("tiles")
    config = replace(config, **found)
    if config != asked:
        say(
            f"to fit --device-memory {config.device_memory}: --offload-weights {config.offload_weights} --precision "
            f"{config.precision}"
        )
    for line in tile_lines(tiles):
        say(f"to fit --device-memory {config.device_memory}: {line}")
    check_weights_folder(config.weights_place)
    tokenizer = load_tokenizer(folder, trust)
    files = find_files(source.data, source.glob, say)
    kind = kind_of(files)
    segments = None
    if kind == TEXT:
        if config.pack == "fill":
            raise InputError(
                "--pack fill: expected prompts with completions, or messages, got text, whose rows are full already"
            )
        check_text(files)
    else:
        segments = read_segments(files, kind, tokenizer)
    fingerprint = config.fixed() | {"data": file_list(files), "model_files": model_files(folder)}
    run = replace(run, config=config, fingerprint=fingerprint)
    with begun(run):
        with run.processes.in_turn():
            rows = _rows(run, files, segments, tokenizer)
        memory.import_models()
        baseline = memory.in_use(run.device)
        model, loss, pack = _build(config, run.device, checked, tokenizer, kind, say, tiles)
        count = sum(p.numel() for p in trained(model))
        if kind == CHAT:
            without_template = "shoestring's: a line with each role, then its text; the tokenizer has none"
            template = "the template of the tokenizer" if tokenizer.chat_template else without_template
            say(f"chat format: {template}")
        how = "" if kind == TEXT else ", padded" if pack == "none" else ", packed"
        say(
            f"{count / 1e6:.2f} M trained parameters, {len(rows[0]):,} rows of {kind}{how}, {config.steps} steps on "
            f"{run.device}"
        )

        def save_model(model: Any, target: Path) -> None:
            if kind == CHAT:
                stop_at_answers(model, tokenizer)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)

        def save(target: Path) -> None:
            if config.full:
                save_model(trainer.model, target)
            else:
                save_adapter(trainer.model, target, config.baseline)

        with Console(config.steps, config.eval_every if len(rows[1]) else 0) as console:
            trainer = Trainer(run, model, loss, *rows, console, pack)
            del model, loss  # a loss holds the model

            def rebuild(config: LoopConfig) -> None:
                """Load the frozen weights below an adapter in the dtype of the precision that was chosen."""
                if not isinstance(config, FinetuneConfig) or config.full:
                    return
                del trainer.model, trainer.loss
                gc.collect()
                trainer.model, trainer.loss, trainer.pack = _build(
                    config, run.device, checked, tokenizer, kind, lambda line: None, tiles
                )

            summary = execute(trainer, baseline, save, rebuild)
        if config.merge and summary:
            dtype = _loaded_dtype(replace(config, precision=summary["precision"]))
            del trainer, rebuild
            base = load_model(checked, dtype, trust_remote_code=trust)
            base = merge_adapter(base, run.folder / config.result, config.baseline)
            with atomic_directory(run.folder / "model") as partial:
                save_model(base, partial)
    return summary


def _loaded_dtype(config: FinetuneConfig) -> torch.dtype:
    """Return the dtype in which the weights of the model are loaded, unless they are quantised."""
    return weight_dtype(config.weights) if config.full else base_dtype(config.autocast)


def _build(
    config: FinetuneConfig,
    device: torch.device,
    checked: ModelDirectory,
    tokenizer: Any,
    kind: str,
    tell: Callable[[str], object],
    tiles: dict[str, int],
) -> tuple[Any, Loss, str]:
    """Return the model with its adapters, its loss, and how examples are packed.

    Args:
        tell: gets what is patched.
        tiles: the layers that leave in tiles, with the rows of a tile.
    """
    torch.manual_seed(config.seed)
    quantize = None if config.baseline else config.frozen_format
    model = load_model(
        checked, _loaded_dtype(config), quantize, config.trust_remote_code, device, config.blocks_place,
        memory.kept_bytes(config.keep), config.double_quant, tiles,
    )  # fmt: skip
    if vocabulary_size(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise InputError(
            f"{checked.folder}: the tokenizer has {vocabulary_size(tokenizer)} tokens, the model's embedding fewer"
        )
    fused = None if config.baseline else fused_loss(model, config.workspace_mb, tell)
    pack = config.pack if fused is not None and kind != TEXT and can_pack(model) else "none"
    if config.pack == "fill" and pack == "none":
        raise InputError(
            f"--pack fill: expected a model with shoestring's attention, got {type(model).__name__}; take "
            "--pack none"
        )
    if not config.full:
        model = apply_lora(model, config)
        for line in [] if config.baseline else expert_lines(model):
            tell(line)
        trained_to(model, weight_dtype(config.weights))
    return model, fused or plain_loss(model), pack


def _rows(
    run: Run[FinetuneConfig], files: list[Path], segments: Texts | None, tokenizer: Any
) -> tuple[Rows, Rows]:
    """Return the rows for training and for validation."""
    config = run.config
    if segments is not None:
        encoded = encode_examples(segments, tokenizer, config.seq_len)
        for note in encoded.notes:
            say(note)
        return split_examples(encoded.examples, config.seed, config.val_fraction)
    tokens, _ = prepare_tokens(run.folder, files, tokenizer, config.seed)
    return split_blocks(tokens, config.seq_len, config.val_fraction)

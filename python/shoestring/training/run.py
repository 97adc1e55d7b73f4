"""A run and its folder: what both commands do before, around and after the loop."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.data.batches import Rows
from shoestring.data.errors import InputError
from shoestring.data.files import atomic_directory, remove_partial, write_json
from shoestring.optim.offload import PLACES, is_place
from shoestring.training import memory
from shoestring.checkpointing.model import CheckpointReport, checkpoint_model, parse_bytes
from shoestring.training.checkpoint import checkpoints, load_checkpoint
from shoestring.training.config import Fingerprint, LoopConfig
from shoestring.training.loop import Progress, Trainer, make_optimizer
from shoestring.training.models import Loss
from shoestring.training.summary import summarise


@dataclass
class RunOptions:
    """What may differ between a run and its continuation."""

    out: Path
    resume: bool = False
    checkpoint_every: int = 50
    threads: int | None = None
    memory_budget: str | None = None  # bytes of activations, such as "2GiB"
    offload: str = "none"  # where the optimizer's state lies
    trust_remote_code: bool = False  # run code that the model directory brings

    def check(self, config: LoopConfig) -> None:
        """Refuse a folder that is in use, and options that do not go together, before anything else happens."""
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out}: exists and is not a directory")
        if self.memory_budget is not None:
            try:
                parse_bytes(self.memory_budget)
            except ValueError as error:
                raise InputError(f"--memory-budget: {error}") from None
            if config.plain or config.gradient_checkpointing:
                other = "--plain" if config.plain else "--gradient-checkpointing"
                raise InputError(f"--memory-budget {self.memory_budget}: expected without {other}; leave one of them out")
        if self.offload != "none" and not is_place(self.offload):
            raise InputError(f"--offload: expected {PLACES}, got {self.offload}")
        if self.offload != "none" and config.plain:
            raise InputError(f"--offload {self.offload}: expected without --plain; leave one of them out")
        used = self.out.is_dir() and any(self.out.iterdir())
        if used and not self.resume:
            raise InputError(
                f"--out {self.out}: the directory is not empty; give another, or --resume to continue the run in it"
            )
        if (
            used
            and not (self.out / "run.json").is_file()
            and any(not p.name.endswith(".partial") for p in self.out.iterdir())
        ):
            raise InputError(f"--resume {self.out}: not the directory of a run (no run.json in it)")


def file_list(files: list[Path]) -> list[list[Any]]:
    """Name and size of each data file: what a continued run must find again."""
    return [[path.name, path.stat().st_size] for path in files]


@contextmanager
def run_folder(options: RunOptions, command: str, fingerprint: Fingerprint) -> Iterator[Path]:
    """Create (or check) the run folder with its run.json; a folder made here goes again if nothing was trained.

    Also sets the number of threads: a continued run takes the recorded one, because sums depend on it.
    """
    out, record = options.out, options.out / "run.json"
    recorded: dict[str, Any] = {}
    if record.is_file():
        import json

        try:
            recorded = json.loads(record.read_text("utf-8"))
            if recorded["command"] != command:
                raise InputError(
                    f"--resume {out}: a run of `shoestring {recorded['command']}`, not of `shoestring {command}`"
                )
            fingerprint.require_equal(recorded["fingerprint"], str(out))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{record}: not the record of a run ({type(error).__name__}: {error})") from None
    threads = options.threads or recorded.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    created = [parent for parent in [out, *out.parents] if not parent.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        remove_partial(out)
        remove_partial(out / "checkpoints")
        if not recorded or recorded.get("threads") != threads:
            versions = {"torch": torch.__version__, "threads": threads}
            write_json(record, {"command": command, **versions, "fingerprint": fingerprint.values})
        yield out
    except BaseException:
        if not recorded and not checkpoints(out) and not (out / "metrics.jsonl").exists():
            for path in created:
                shutil.rmtree(path, ignore_errors=True) if path == out else path.rmdir()
            if not created:  # the folder was there, empty, before
                for path in out.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _fit_memory(trainer: Trainer, budget: str) -> CheckpointReport:
    """Checkpoint as many blocks as the budget asks for."""
    trainer.model.train()
    try:
        return checkpoint_model(trainer.model, budget=budget, example=trainer.largest_batch)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].removeprefix("checkpoint_model: ").removeprefix("checkpoint_plan: ")
        raise InputError(f"--memory-budget {budget}: {reason}") from None


def execute(
    config: LoopConfig,
    options: RunOptions,
    fingerprint: Fingerprint,
    model: nn.Module,
    make_loss: Callable[[], Loss],
    data: tuple[Rows, Rows],
    progress: Progress,
    baseline: int,
    save: Callable[[Path], None],
    result: str,
    packed: bool = False,
) -> dict[str, Any]:
    """Train, save the result folder, write the summary and the report; return the summary.

    ``baseline`` is the resident memory before the model was made; ``save`` fills the folder ``run/result``; ``packed``:
    examples one after the other, without padding.
    """
    run = options.out
    try:
        optimizer = make_optimizer(model, config, None if options.offload == "none" else options.offload)
    except RuntimeError as error:  # no such folder, or no room in it
        raise InputError(f"--offload {options.offload}: {str(error).splitlines()[0]}") from None
    if config.gradient_checkpointing and config.plain:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = Trainer(
        config, model, make_loss(), optimizer, *data, run, options.checkpoint_every, progress, fingerprint.values,
        packed,
    )  # fmt: skip
    report = None
    if config.gradient_checkpointing and not config.plain:
        report = checkpoint_model(model)
    if options.memory_budget is not None:
        report = _fit_memory(trainer, options.memory_budget)
        trainer.planned_activations = report.held_bytes
        progress.note(f"activations: {report}")
    start = 0
    existing = checkpoints(run)
    if existing:
        state = load_checkpoint(existing[-1], model, optimizer)
        start, trainer.val_loss, trainer.best_val_loss = state["step"], state["val_loss"], state["best_val_loss"]
    began = time.time()
    trainer.fit(start)
    peak = memory.peak_bytes()
    if config.gradient_checkpointing and config.plain:
        model.gradient_checkpointing_disable()
    if report is not None:
        report.undo()
    with atomic_directory(run / result) as folder:
        save(folder)
    summary = summarise(trainer, baseline, peak, time.time() - began)
    write_json(run / "summary.json", summary)
    return summary

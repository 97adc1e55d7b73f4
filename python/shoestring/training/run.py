"""A run and its folder: what both commands do before, around and after the loop."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.checkpoint.model import CheckpointReport, checkpoint_model, parse_bytes
from shoestring.core.errors import InputError
from shoestring.data.batches import Rows
from shoestring.files.atomic import PARTIAL, atomic_directory, remove_partial, write_json
from shoestring.files.lock import LOCK, locked
from shoestring.optim.offload import PLACES, is_place
from shoestring.training import memory
from shoestring.training.checkpoint import checkpoints, load_checkpoint, step_of
from shoestring.training.config import MOST_THREADS, Fingerprint, LoopConfig
from shoestring.training.loop import Progress, Trainer, make_optimizer
from shoestring.training.models import Loss
from shoestring.training.signals import Interrupted
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
        """Refuse options that do not go together, and another folder than a run's, before anything else happens."""
        if self.memory_budget is not None:
            try:
                parse_bytes(self.memory_budget)
            except ValueError as error:
                raise InputError(f"--memory-budget: {error}") from None
            if config.plain or config.gradient_checkpointing:
                other = "--plain" if config.plain else "--gradient-checkpointing"
                raise InputError(
                    f"--memory-budget {self.memory_budget}: expected without {other}; leave one of them out"
                )
        if self.offload != "none" and not is_place(self.offload):
            raise InputError(f"--offload: expected {PLACES}, got {self.offload}")
        if self.offload != "none" and config.plain:
            raise InputError(f"--offload {self.offload}: expected without --plain; leave one of them out")
        try:
            if self.out.exists() and not self.out.is_dir():
                raise InputError(f"--out {self.out}: exists and is not a directory")
            if not (
                self.out / LOCK
            ).exists():  # with one, another process may be at work: its lock is asked first
                self.check_folder()
        except OSError as error:  # no permission, a name too long
            raise InputError(f"--out {self.out}: {error.strerror}") from None

    def check_folder(self) -> None:
        """Refuse a folder whose content would be mixed with the run's."""
        names = [path.name for path in self.out.iterdir() if path.name != LOCK] if self.out.is_dir() else []
        if names and not self.resume:
            raise InputError(
                f"--out {self.out}: the directory is not empty; give another, or --resume to continue the run in it"
            )
        if not (self.out / "run.json").is_file() and any(not name.endswith(PARTIAL) for name in names):
            raise InputError(f"--resume {self.out}: not the directory of a run (no run.json in it)")


def file_list(files: list[Path]) -> list[list[Any]]:
    """Name and size of each data file: what a continued run must find again."""
    return [[path.name, path.stat().st_size] for path in files]


@contextmanager
def run_folder(options: RunOptions, command: str, fingerprint: Fingerprint) -> Iterator[Path]:
    """Lock and create (or check) the run folder with its run.json; one made here goes again if nothing was trained.

    Also sets the number of threads: a continued run takes the recorded one, because sums depend on it.

    Raises:
        InputError: another process uses the folder, or it holds another run or something else.
        Interrupted: a signal came; the text says what the folder holds.
    """
    out = options.out
    created = [parent for parent in [out, *out.parents] if not parent.exists()]
    try:
        with locked(out / LOCK, f"--out {out}"):
            options.check_folder()
            recorded = _read_record(out, command, fingerprint)
            try:
                _begin(options, command, fingerprint, recorded)
                yield out
            except BaseException:
                if not recorded and not checkpoints(out) and not (out / "metrics.jsonl").exists():
                    for path in out.iterdir():
                        if path.name != LOCK:
                            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                raise
    except BaseException as error:
        with suppress(OSError):  # a folder that holds anything stays
            for path in created:
                path.rmdir()
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            raise Interrupted(getattr(error, "number", signal.SIGINT), _kept(out)) from None
        raise


def _read_record(out: Path, command: str, fingerprint: Fingerprint) -> dict[str, Any]:
    """Return run.json, or nothing where there is none; raises InputError where it records another run."""
    path = out / "run.json"
    if not path.is_file():
        return {}
    try:
        recorded = json.loads(path.read_text("utf-8"))
        for name, kind in (("command", str), ("fingerprint", dict), ("threads", int)):
            if not isinstance(recorded, dict) or not isinstance(recorded.get(name), kind):
                raise ValueError(f"{name}: expected {kind.__name__}")
        if not 1 <= recorded["threads"] <= MOST_THREADS:
            raise ValueError(f"threads: expected 1 to {MOST_THREADS}, got {recorded['threads']}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not the record of a run ({error}); give another --out") from None
    if recorded["command"] != command:
        raise InputError(
            f"--resume {out}: a run of `shoestring {recorded['command']}`, not of `shoestring {command}`"
        )
    fingerprint.require_equal(recorded["fingerprint"], str(out))
    result: dict[str, Any] = recorded
    return result


def _begin(options: RunOptions, command: str, fingerprint: Fingerprint, recorded: dict[str, Any]) -> None:
    """Set the threads, remove what a killed process left half-written, and write run.json."""
    threads = options.threads or recorded.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    remove_partial(options.out)
    remove_partial(options.out / "checkpoints")
    if recorded.get("threads") != threads:
        versions = {"torch": torch.__version__, "threads": threads}
        write_json(
            options.out / "run.json", {"command": command, **versions, "fingerprint": fingerprint.values}
        )


def _kept(out: Path) -> str:
    """Describe what an interrupted run leaves, for the terminal."""
    existing = checkpoints(out)
    if existing:
        return f"checkpoint at step {step_of(existing[-1])}, continue with --resume"
    if (out / "run.json").exists():
        return f"interrupted before the first checkpoint; {out} holds no trained step"
    return "interrupted before the first step; nothing was written"


@contextmanager
def _offload_errors(options: RunOptions) -> Iterator[None]:
    """Turn the refusal of the place that --offload names into one line: no such folder, or no room in it."""
    try:
        yield
    except RuntimeError as error:
        if options.offload == "none":
            raise
        raise InputError(f"--offload {options.offload}: {str(error).splitlines()[0]}") from None


def _fit_memory(trainer: Trainer, budget: str) -> CheckpointReport:
    """Checkpoint as many blocks as the budget asks for."""
    trainer.model.train()
    try:
        return checkpoint_model(trainer.model, budget=budget, example=trainer.largest_batch)
    except (ValueError, RuntimeError) as error:
        reason = (
            str(error).splitlines()[0].removeprefix("checkpoint_model: ").removeprefix("checkpoint_plan: ")
        )
        raise InputError(f"--memory-budget {budget}: {reason}") from None


def execute(
    config: LoopConfig,
    options: RunOptions,
    fingerprint: Fingerprint,
    model: Any,
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
    with _offload_errors(options):
        optimizer = make_optimizer(model, config, None if options.offload == "none" else options.offload)
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
        with _offload_errors(options):
            state = load_checkpoint(existing[-1], model, optimizer)
        start, trainer.val_loss, trainer.best_val_loss = (
            state["step"],
            state.get("val_loss"),
            state.get("best_val_loss"),
        )
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

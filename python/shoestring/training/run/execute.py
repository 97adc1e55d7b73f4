"""Run one training command: prepare the run folder, train, and write the results."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from shoestring.checkpoint.blocks import find_blocks
from shoestring.checkpoint.model import CheckpointReport, checkpoint_model
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.errors import InputError
from shoestring.core.host_allocator import host_allocator
from shoestring.data.batches import Rows
from shoestring.files.atomic import PARTIAL, atomic_directory, remove_partial, write_json
from shoestring.files.lock import LOCK, locked
from shoestring.optim.offload import PLACES, is_place
from shoestring.training import memory
from shoestring.training.config import MOST_THREADS, Fingerprint, LoopConfig
from shoestring.training.conflicts import run_conflicts
from shoestring.training.optimizers import check_optimizer, make_optimizers
from shoestring.training.options import refuse_together
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint, step_of
from shoestring.training.run.device import check_precision, find_device
from shoestring.training.run.loop import Progress, Trainer
from shoestring.training.run.models import Loss
from shoestring.training.run.processes import Processes, connect, parallel
from shoestring.training.run.signals import Interrupted
from shoestring.training.run.summary import summarise
from shoestring.training.run.weights import let_weights_leave, weights_errors


def check_run(config: LoopConfig, out: Path) -> Processes:
    """Connect to the other processes of the run.

    Raises:
        InputError: options contradict each other, --out is unusable, or the processes do not connect.
            Nothing is written then.
    """
    if config.memory_budget is not None:
        memory.parse_budget(config.memory_budget)
    if config.offload != "none" and not is_place(config.offload):
        raise InputError(f"--offload: expected {PLACES}, got {config.offload}")
    refuse_together(run_conflicts(config))
    check_precision(config, find_device(config.device))
    check_optimizer(config)
    processes = connect(config)
    if not processes.is_first:
        return processes
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: exists and is not a directory")
        # A lock file means that another process may be using the folder. In that case run_folder() first
        # takes the lock.
        if not (out / LOCK).exists():
            _check_folder(out, config.resume)
    except OSError as error:  # raised if a permission is missing, or a name is too long
        raise InputError(f"--out {out}: {error.strerror}") from None
    return processes


def _check_folder(out: Path, resume: bool) -> None:
    """Raise InputError if the folder holds files that do not belong to this run."""
    names = [path.name for path in out.iterdir() if path.name != LOCK] if out.is_dir() else []
    if names and not resume:
        raise InputError(
            f"--out {out}: the directory is not empty; give another, or --resume to continue the run in it"
        )
    if not (out / "run.json").is_file() and any(not name.endswith(PARTIAL) for name in names):
        raise InputError(f"--resume {out}: not the directory of a run (no run.json in it)")


@contextmanager
def run_folder(
    config: LoopConfig, out: Path, command: str, fingerprint: Fingerprint, processes: Processes
) -> Iterator[Path]:
    """Lock the run folder, create or check it, write run.json, and yield the folder's path.

    If the ``with`` block fails before the first step is complete, the files and folders that this function
    made are removed. The function also sets the number of threads. By default, a resumed run takes the number
    that the first run recorded, because the order of summation depends on it. In the block, CPU tensors come
    from the allocator that ``--host-allocator`` selects.

    Raises:
        InputError: another process uses the folder, or the folder holds another run or other files.
        Interrupted: a signal arrived; the text of the exception says what the run folder holds.
    """
    if not processes.is_first:  # the first process has the lock, and writes all files
        processes.barrier()
        recorded = _read_record(out, command, fingerprint)
        torch.set_num_threads(recorded["threads"])
        with _allocator(config):
            yield out
        return
    created = [parent for parent in [out, *out.parents] if not parent.exists()]
    try:
        with locked(out / LOCK, f"--out {out}"):
            _check_folder(out, config.resume)
            recorded = _read_record(out, command, fingerprint)
            try:
                _begin(config, out, command, fingerprint, recorded)
                processes.barrier()
                with _allocator(config):
                    yield out
            except BaseException:
                if not recorded and not checkpoints(out) and not (out / "metrics.jsonl").exists():
                    for path in out.iterdir():
                        if path.name != LOCK:
                            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                raise
    except BaseException as error:
        with suppress(OSError):  # rmdir raises OSError if a folder is not empty; such a folder is kept
            for path in created:
                path.rmdir()
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            raise Interrupted(getattr(error, "number", signal.SIGINT), _kept(out)) from None
        raise


def _read_record(out: Path, command: str, fingerprint: Fingerprint) -> dict[str, Any]:
    """Return the content of run.json, or {} without the file. Raise InputError if it records another run."""
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


def _begin(
    config: LoopConfig, out: Path, command: str, fingerprint: Fingerprint, recorded: dict[str, Any]
) -> None:
    """Set the number of threads, remove partial files of a killed process, and write run.json."""
    threads = config.threads or recorded.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    remove_partial(out)
    remove_partial(out / "checkpoints")
    settings = {"threads": threads, "host_allocator": _uses_host_allocator(config)}
    if any(recorded.get(name) != value for name, value in settings.items()):
        record = {"command": command, "torch": torch.__version__, **settings}
        write_json(out / "run.json", {**record, "fingerprint": fingerprint.values})


def _uses_host_allocator(config: LoopConfig) -> bool:
    """Tell whether CPU tensors of the run come from the allocator of :func:`shoestring.host_allocator`."""
    if config.host_allocator is not None:
        return config.host_allocator
    return not config.baseline and sys.platform == "linux" and find_device(config.device).type == "cpu"


def _allocator(config: LoopConfig) -> AbstractContextManager[object]:
    return host_allocator() if _uses_host_allocator(config) else nullcontext()


def _kept(out: Path) -> str:
    """Return a text for the terminal that says what the folder of an interrupted run holds."""
    existing = checkpoints(out)
    if existing:
        return f"checkpoint at step {step_of(existing[-1])}, continue with --resume"
    if (out / "run.json").exists():
        return f"interrupted before the first checkpoint; {out} holds no trained step"
    return "interrupted before the first step; nothing was written"


@contextmanager
def _offload_errors(offload: str) -> Iterator[None]:
    """Turn an error about the place given by --offload (no folder, no space) into a one-line InputError."""
    try:
        yield
    except RuntimeError as error:
        if offload == "none":
            raise
        raise InputError(f"--offload {offload}: {str(error).splitlines()[0]}") from None


def _fit_memory(trainer: Trainer, budget: str, offload: offload_activations | None) -> CheckpointReport:
    """Recompute or offload as many blocks of the model as the memory budget requires."""
    trainer.model.train()
    try:
        return checkpoint_model(trainer.model, budget=budget, example=trainer.largest_batch, offload=offload)
    except (ValueError, RuntimeError) as error:
        reason = (
            str(error).splitlines()[0].removeprefix("checkpoint_model: ").removeprefix("checkpoint_plan: ")
        )
        raise InputError(f"--memory-budget {budget}: {reason}") from None


def execute(
    config: LoopConfig,
    run: Path,
    fingerprint: Fingerprint,
    model: Any,
    device: torch.device,
    make_loss: Callable[[], Loss],
    data: tuple[Rows, Rows],
    progress: Progress,
    baseline: int,
    save: Callable[[Path], None],
    result: str,
    pack: str = "none",
    processes: Processes = Processes(),  # noqa: B008  (immutable)
) -> dict[str, Any]:
    """Train, save the result folder and write summary.json; return the summary.

    The first process of the run writes, and the others return an empty dictionary.

    Args:
        run: folder of the run.
        baseline: bytes of the device's memory that were in use before the model was made.
        save: function that fills the folder ``run/result``.
        pack: "none", or whether a micro-batch is one row of examples without padding: "batch" or "fill".
    """
    recomputes = config.activations == "recompute"
    if recomputes and config.baseline:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = Trainer(
        config, model, device, make_loss(), [], *data, run, progress, fingerprint.values, pack, processes=processes
    )  # fmt: skip
    report, offload = None, None
    if config.activations == "offload":
        offload = offload_activations(device=device, exclude=model)
    if recomputes and not config.baseline:
        report = checkpoint_model(model)
    if config.memory_budget is not None:
        report = _fit_memory(trainer, config.memory_budget, offload)
        trainer.planned_activations = report.held_bytes
        progress.note(f"activations: {report}")
    elif offload is not None:
        offload.mark_layers(find_blocks(model, None).values())
        trainer.offload = offload
    # The plan of the memory budget runs backward passes, in which --step-in-backward must not step.
    trainer.parallel = parallel(model, config, processes)
    if trainer.parallel is not None:
        progress.note(str(trainer.parallel))
    elif config.parallel != "none":
        progress.note(f"--parallel {config.parallel}: one process, which splits and sends nothing")
    with _offload_errors(config.offload):
        splits = trainer.parallel is not None and trainer.parallel.strategy == "zero2"
        trainer.optimizers = make_optimizers(model, config, splits)
    if config.compile:
        model.compile()
    start = 0
    existing = checkpoints(run)
    if existing:
        with _offload_errors(config.offload):
            state = load_checkpoint(
                existing[-1], model, trainer.optimizers, scaler=trainer.scaler, device=device
            )
        start, trainer.val_loss, trainer.best_val_loss = (
            state["step"],
            state.get("val_loss"),
            state.get("best_val_loss"),
        )
    # The plan, the optimizer and a checkpoint may read or change all weights, so weights leave after that.
    trainer.offloaded = let_weights_leave(model, config, trainer.optimizers)
    began = time.time()
    with weights_errors(config.weights_place, trainer.kept):
        trainer.fit(start)
        trainer.finish()
    used = memory.usage(device)
    peak = used.get("device_peak", used["peak"])
    peaks = processes.of_all(peak)
    if trainer.parallel is not None:
        trainer.parallel.undo()
    if not processes.is_first:
        return {}
    if recomputes and config.baseline:
        model.gradient_checkpointing_disable()
    if report is not None:
        report.undo()
    with weights_errors(config.weights_place, trainer.kept), atomic_directory(run / result) as folder:
        save(folder)
    summary = summarise(trainer, baseline, peak, time.time() - began)
    if trainer.parallel is not None:
        summary |= {
            "parallel": trainer.parallel.strategy,
            "compress": trainer.parallel.compress,
            "processes": processes.count,
            "peak_of_processes": peaks,
        }
    write_json(run / "summary.json", summary)
    return summary

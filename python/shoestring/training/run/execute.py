"""Train the model of a run, and write the results into its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoestring.checkpoint.blocks import find_blocks
from shoestring.checkpoint.model import CheckpointReport, checkpoint_model
from shoestring.checkpoint.offload import offload_activations
from shoestring.core.errors import InputError
from shoestring.core.process_memory import return_freed
from shoestring.files.atomic import atomic_directory, write_json
from shoestring.training import memory
from shoestring.training.config import LoopConfig
from shoestring.training.optimizers import make_optimizers
from shoestring.training.report.write import write_report
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint
from shoestring.training.run.loop import Trainer
from shoestring.training.run.plan import apply_plan, choose_plan
from shoestring.training.run.precision import planned_in_precision
from shoestring.training.run.processes import parallel
from shoestring.training.run.summary import summarise
from shoestring.training.run.weights import let_weights_leave, weights_errors


def execute(
    trainer: Trainer,
    baseline: int,
    save: Callable[[Path], None],
    rebuild: Callable[[LoopConfig], None] | None = None,
) -> dict[str, Any]:
    """Train, save the result folder, and write summary.json and the report; return the summary.

    The first process of the run writes, and the others return an empty dictionary.

    Args:
        trainer: the training loop, without optimizers.
        baseline: bytes of the device's memory that were in use before the model was made.
        save: function that fills the folder of the result.
        rebuild: builds the trainer's model anew for the precision that was chosen, if its weights depend on it.
    """
    plan = planned_in_precision(trainer, rebuild, choose_plan)
    run, model, progress = trainer.run, trainer.model, trainer.progress
    config, processes = run.config, run.processes
    report = _plan_activations(trainer) if plan is None else apply_plan(trainer, plan)
    # The plan of the memory budget runs backward passes, in which --step-in-backward must not step.
    trainer.parallel = parallel(model, config, processes)
    if trainer.parallel is not None:
        progress.note(str(trainer.parallel))
    elif config.parallel != "none":
        progress.note(f"--parallel {config.parallel}: one process, which splits and sends nothing")
    with _offload_errors(config.offload):
        trainer.optimizers = make_optimizers(model, config, trainer.optimizer_clips)
    if config.compile:
        model.compile()
    start = _resume(trainer)
    # The plan, the optimizer and a checkpoint may read or change all weights, so weights leave after that.
    trainer.offloaded = let_weights_leave(model, config, trainer.optimizers)
    began = time.time()
    with weights_errors(config.weights_place, trainer.checkpoint_note):
        trainer.fit(start)
    usage = memory.usage(run.device)
    peak = usage.get("device_peak", usage["peak"])
    peaks = processes.of_all(peak)
    return_freed()  # the report needs memory, too
    if trainer.parallel is not None:
        trainer.parallel.undo()
    if not processes.is_first:
        return {}
    if config.activations == "recompute" and config.baseline:
        model.gradient_checkpointing_disable()
    if report is not None:
        report.undo()
    with (
        weights_errors(config.weights_place, trainer.checkpoint_note),
        atomic_directory(run.folder / config.result) as folder,
    ):
        save(folder)
    summary = summarise(trainer, baseline, peak, time.time() - began)
    if plan is not None:
        summary |= {"planned_peak": plan.peak, "planned_seconds": plan.seconds}
    if trainer.parallel is not None:
        summary |= {
            "parallel": trainer.parallel.strategy,
            "compress": trainer.parallel.compress,
            "processes": processes.count,
            "peak_of_processes": peaks,
        }
    write_json(run.folder / "summary.json", summary)
    write_report(run.folder)
    return summary


def _plan_activations(trainer: Trainer) -> CheckpointReport | None:
    """Recompute or offload the activations of blocks as the options say; return what is recomputed."""
    config, model = trainer.run.config, trainer.model
    report, offload = None, None
    if config.activations == "offload":
        offload = offload_activations(device=trainer.run.device, exclude=model)
    if config.activations == "recompute":
        if config.baseline:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            try:
                report = checkpoint_model(model)
            except ValueError as error:
                reason = str(error).removeprefix("checkpoint_model: blocks: ").partition(";")[0]
                raise InputError(f"--activations recompute: {reason}; leave the option out") from None
    if config.memory_budget is not None:
        model.train()
        try:
            report = checkpoint_model(
                model, budget=config.memory_budget, example=trainer.largest_batch, offload=offload
            )
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            reason = reason.removeprefix("checkpoint_model: ").removeprefix("checkpoint_plan: ")
            raise InputError(f"--memory-budget {config.memory_budget}: {reason}") from None
        trainer.planned_activations = report.held_bytes
        trainer.progress.note(f"activations: {report}")
    elif offload is not None:
        offload.mark_layers(find_blocks(model, None).values())
        trainer.offload = offload
    return report


def _resume(trainer: Trainer) -> int:
    """Load the newest checkpoint of the run, if it has one; return the number of steps so far."""
    existing = checkpoints(trainer.run.folder)
    if not existing:
        return 0
    with _offload_errors(trainer.run.config.offload):
        state = load_checkpoint(
            existing[-1], trainer.model, trainer.optimizers, scaler=trainer.scaler, device=trainer.run.device
        )
    trainer.val_loss, trainer.best_val_loss = state.get("val_loss"), state.get("best_val_loss")
    step: int = state["step"]
    return step


@contextmanager
def _offload_errors(offload: str) -> Iterator[None]:
    """Turn an error about the place given by --offload (no folder, no space) into a one-line InputError."""
    try:
        yield
    except RuntimeError as error:
        if offload == "none":
            raise
        raise InputError(f"--offload {offload}: {str(error).splitlines()[0]}") from None

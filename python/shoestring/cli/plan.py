"""`shoestring plan`: print the fastest plan of a fine-tuning within budgets of memory, and what more memory would win."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoestring.cli.config import Source
from shoestring.cli.console import gigabytes, print_table
from shoestring.cli.finetune import finetune
from shoestring.core.errors import InputError
from shoestring.distributed.links import Link
from shoestring.files.atomic import atomic_file
from shoestring.planning.training_plan import TrainingPlan
from shoestring.training.config import LoopConfig, PlanConfig
from shoestring.training.conflicts import check_shares, parallel_conflicts, unplanned
from shoestring.training.estimate.ranks import parse_link
from shoestring.training.options import environment_number, refuse_together
from shoestring.training.report.plots import draw_frontier
from shoestring.training.run.loop import Trainer
from shoestring.training.run.plan import plan_run
from shoestring.training.run.precision import planned_in_precision

MOST_POINTS = 12  # rows of the table of budgets


def plan(config: PlanConfig, source: Source, plot: Path | None, as_json: Path | None) -> None:
    """Print a plan, with --world that of each process; write the plot and the plan's file if they are wanted."""
    if config.resume:
        raise InputError("--resume: expected a new plan; the plan of a run is in its run.json")
    for option in unplanned(config):
        raise InputError(f"{option}: expected an option for which plans are made; leave it out")
    link = _check_world(config)
    _check_files({"--plot": plot, "--json": as_json})
    found: list[tuple[TrainingPlan, int]] = []

    def execute(
        trainer: Trainer,
        baseline: int,
        save: Callable[[Path], None],
        rebuild: Callable[[LoopConfig], None] | None,
    ) -> dict[str, Any]:
        made = planned_in_precision(
            trainer, rebuild, functools.partial(plan_run, processes=config.processes, link=link)
        )
        longest = trainer.longest_rows()
        rows = made.micro_batch * made.accumulate * config.processes
        found.append((made, trainer.train.count(longest) * rows // max(1, len(longest))))
        return {}

    with tempfile.TemporaryDirectory() as folder:
        finetune(config, source, Path(folder) / "run", execute)
    (made, tokens), *_ = found
    if config.processes > 1:
        print(f"{made.parallel} over {config.processes} processes; the plan and the memory of one of them:")
    _print(made, tokens)
    if as_json is not None:
        try:
            made.save(as_json)
        except RuntimeError as error:
            raise InputError(
                f"--json {str(error).partition(chr(10))[0].removeprefix('TrainingPlan: save: ')}"
            ) from None
    if plot is not None:
        with atomic_file(plot) as file:
            file.write(draw_frontier(_points(made, tokens), made.peak))


def _check_world(config: PlanConfig) -> Link | None:
    """Return the link of several processes, or None for one; raise InputError for the first option that does not fit."""
    started = environment_number("WORLD_SIZE", 1)
    if started > 1:
        raise InputError(
            f"plan: expected one process, which plans for as many as --world says, got the {started} of torchrun"
        )
    if config.world is None:
        for name in ("link", "parallel"):
            if getattr(config, name) != getattr(PlanConfig, name):
                raise InputError(f"--{name} {getattr(config, name)}: expected --world as well, received none")
        return None
    link = parse_link(config.link)
    if config.world == 1:
        if link is not None:
            raise InputError(
                f"--link {config.link}: expected none for one process; leave it out, or raise --world"
            )
        return None
    if config.parallel == "none":
        raise InputError(
            f"--parallel: expected auto, ddp, zero1, zero2 or zero3 with --world {config.world}, got none"
        )
    if link is None:
        raise InputError(
            f"--world {config.world}: expected --link as well, such as 10Gbit,50us, received none; "
            "shoestring.distributed.measure_link measures it"
        )
    check_shares(config.accumulate, config.world)
    refuse_together(parallel_conflicts(config, config.parallel, config.compress))
    return link


def _check_files(paths: dict[str, Path | None]) -> None:
    """Raise InputError if a file cannot be written, before anything is measured; leave no file."""
    given = {option: path for option, path in paths.items() if path is not None}
    for option, path in given.items():
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise InputError(f"{option} {path}: {error.strerror}; name a file that can be written") from None
    if len({path.resolve() for path in given.values()}) < len(given):
        raise InputError(f"{' and '.join(given)}: expected two files, got {path} for both; name another one")


def _points(made: TrainingPlan, tokens: int) -> list[tuple[int, float]]:
    """Return peak memory in bytes and tokens per second of the fastest plans of all budgets."""
    return [(point["peak_bytes"], tokens / point["seconds"]) for point in made.frontier]


def _print(made: TrainingPlan, tokens: int) -> None:
    print(made)
    print(f"{tokens / made.seconds:,.0f} tokens/s; memory by phase:")
    print_table([["phase", "memory"], *([each["name"], gigabytes(each["bytes"])] for each in made.phases)])
    points = _points(made, tokens)
    step = max(1, -(-len(points) // MOST_POINTS))
    print("the fastest plans of other budgets:")
    rows = [
        [gigabytes(peak), f"{speed:,.0f}", str(made.frontier[i]["micro_batch"]), str(made.frontier[i]["recomputed"])]
        for i, (peak, speed) in enumerate(points)
        if i % step == 0 or i == len(points) - 1
    ]  # fmt: skip
    print_table([["memory", "tokens/s", "rows in a micro-batch", "blocks that do not keep all"], *rows])
    for other in made.alternatives:
        changed = ", ".join(
            f"{name} {value}"
            for name, value in other["levers"].items()
            if str(getattr(made, name, value)).lower() != value
        )
        print(f"with --freedom {other['freedom']}: {tokens / other['seconds']:,.0f} tokens/s ({changed})")

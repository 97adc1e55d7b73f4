"""A training run: its options, device and processes, and the folder that keeps its files."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shoestring.core.device import is_asynchronous
from shoestring.core.errors import InputError
from shoestring.core.host_allocator import host_allocator
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.files.atomic import PARTIAL, remove_partial, write_json
from shoestring.files.lock import LOCK, locked
from shoestring.planning.training_plan import TrainingPlan, disk_budget
from shoestring.training.config import MOST_THREADS, LoopConfig, require_equal
from shoestring.training.conflicts import check_step, run_conflicts, unplanned
from shoestring.training.optimizers import check_optimizer
from shoestring.training.options import refuse_together
from shoestring.training.run.checkpoint import checkpoints, step_of
from shoestring.training.run.device import CPU, PRECISIONS, check_precision, find_device
from shoestring.training.run.digests import require_prepared
from shoestring.training.run.processes import Processes, connect, disconnect
from shoestring.training.run.signals import Interrupted

if TYPE_CHECKING:
    import numpy as np

Config = TypeVar("Config", bound=LoopConfig)
SPLITS_WEIGHTS = "zero3"  # the strategy of a plan whose weights, and their state, are split
ConfigOfRun = TypeVar("ConfigOfRun", bound=LoopConfig, covariant=True)


@dataclass(frozen=True)
class Run(Generic[ConfigOfRun]):
    """A training run whose options have been checked.

    Attributes:
        config: the options.
        command: "train" or "finetune".
        folder: the folder of ``--out``, which the first process has locked.
        device: the device of this process.
        processes: the processes of the run.
        fingerprint: the settings that must not change when the run is resumed, so that its results are bitwise
            the same.
        plan: the plan of the run, if it has one.
    """

    config: ConfigOfRun
    command: str
    folder: Path
    device: torch.device = CPU
    processes: Processes = field(default_factory=Processes)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    plan: TrainingPlan | None = None

    @property
    def uses_host_allocator(self) -> bool:
        """Whether CPU tensors come from the allocator of :func:`shoestring.host_allocator`."""
        if self.config.host_allocator is not None:
            return self.config.host_allocator
        return not self.config.baseline and sys.platform == "linux" and self.device.type == "cpu"

    def allocator(self) -> AbstractContextManager[object]:
        """Return a context in which CPU tensors come from the selected allocator."""
        return host_allocator() if self.uses_host_allocator else nullcontext()


@contextmanager
def open_run(config: Config, command: str, out: Path) -> Iterator[Run[Config]]:
    """Check the options of a run, find its device, connect to its other processes, and lock its folder.

    If the ``with`` block fails, the folders that this function made are removed unless they hold files.

    Raises:
        InputError: options contradict each other, --out is unusable or in use by another process, or the
            processes do not connect.
        Interrupted: a signal arrived; the text of the exception says what the run folder holds.
    """
    check_step(config)
    if config.replan and not config.resume:
        raise InputError("--replan: expected --resume as well, got a new run; leave --replan out")
    refuse_together(run_conflicts(config))
    check_optimizer(config)
    processes = connect(config)
    # Each process of a machine has taken an accelerator of its own by now.
    device = find_device(config.device)
    check_precision(config.precision, config.weights, device)
    _check_budgets(config, device)
    run = Run(config, command, out, device, processes)
    if processes.is_first:
        with _own_folder(run):
            yield _with_recorded_choices(run)
    else:
        yield _with_recorded_choices(run)
    disconnect(processes)


def _check_budgets(config: LoopConfig, device: torch.device) -> None:
    """Raise InputError if --host-memory or --disk is none that the run can use."""
    if config.host_memory is not None and not is_asynchronous(device):
        raise InputError(
            f"--host-memory {config.host_memory}: expected a GPU, got --device {device}, all of whose memory is that of "
            "--device-memory; leave the option out"
        )
    try:
        disk_budget(config.disk, here=True)
    except InputError as error:
        raise InputError(
            f"--disk {config.disk}: {str(error).removeprefix('plan_training: disk: ')}"
        ) from None


def _with_recorded_choices(run: Run[Config]) -> Run[Config]:
    """Give a run that is resumed the precision and the plan that run.json records."""
    if not run.config.resume:
        return run
    recorded = _recorded(run)
    choices: dict[str, Any] = {}
    precision = recorded.get("fingerprint", {}).get("precision")
    # The comparison of all settings reports a damaged one.
    if run.config.precision == "auto" and precision in PRECISIONS:
        choices["precision"] = precision
    plan = recorded_plan(run)
    config = run.config
    if plan is not None:
        _check_processes(run, plan)
    if plan is None and config.asks_plan and not config.replan and checkpoints(run.folder):
        raise InputError(
            f"--resume {run.folder}: expected no {config.asks_plan}, since the run has begun without a plan; leave the "
            "option out"
        )
    if plan is not None:
        choices |= planned_options(plan, planned_processes(run))
        # The state of split weights is stored in another form, so a new plan keeps their strategy, and no other.
        if config.replan and plan.parallel != SPLITS_WEIGHTS:
            choices.pop("parallel", None)
        for option in unplanned(run.config):
            raise InputError(
                f"--resume {run.folder}: expected no {option}, since the run has a plan; leave the option out"
            )
        asked = run.config.batch_size * run.config.accumulate
        planned = plan.micro_batch * plan.accumulate * planned_processes(run)
        if asked != planned:
            raise InputError(
                f"--resume {run.folder}: --batch-size x --accumulate: expected {planned} rows in a step, as planned, "
                f"got {asked}"
            )
        for name in choices.keys() & run.config.given - {"batch_size", "accumulate"}:
            is_open = name == "parallel" and config.parallel == "auto"
            if getattr(run.config, name) != choices[name] and not is_open:
                raise InputError(
                    f"--resume {run.folder}: {name} differs: {choices[name]} as planned, then "
                    f"{getattr(run.config, name)}; leave the option out"
                )
        activations, treatments = run.config.activations, {one["treatment"] for one in plan.checkpoints}
        if "activations" in run.config.given and treatments - {activations}:
            raise InputError(
                f"--resume {run.folder}: activations differs: {' and '.join(sorted(treatments))} as planned, then "
                f"{activations}; leave the option out"
            )
    return replace(run, config=replace(run.config, **choices)) if choices else run


def planned_processes(run: Run[LoopConfig]) -> int:
    """Return the number of processes that the plan of a run is of, which _with_recorded_choices has checked."""
    number: int = _recorded(run).get("processes", 1)
    return number


def _check_processes(run: Run[LoopConfig], plan: TrainingPlan) -> None:
    """Raise InputError if a plan is of another number of processes, and the run keeps it."""
    planned, count = planned_processes(run), run.processes.count
    is_number = isinstance(planned, int) and not isinstance(planned, bool) and planned >= 1
    if not is_number or (planned == 1) != (plan.parallel == "none"):
        raise InputError(
            f"{run.folder / 'run.json'}: processes: expected the number that the plan is of, with --parallel "
            f"{plan.parallel}, received {str(planned)[:40]}; give another --out"
        )
    if planned != count and not run.config.replan:
        raise InputError(
            f"--resume {run.folder}: processes: expected {planned}, as planned, got {count}; start as many, or give "
            "--replan as well"
        )
    if count == 1 and plan.parallel == SPLITS_WEIGHTS:
        raise InputError(
            f"--resume {run.folder}: expected two or more processes, since the run has split its weights "
            f"({plan.parallel}), got one; start several with torchrun"
        )


def planned_options(plan: TrainingPlan, processes: int) -> dict[str, Any]:
    """Return the options of a run of so many processes that its plan decides."""
    options: dict[str, Any] = {
        "batch_size": plan.micro_batch,
        "accumulate": plan.accumulate * processes,
        "optimizer_state": plan.optimizer_state,
        "step_in_backward": plan.step_in_backward,
        "offload": plan.offload,
    }
    return options if processes == 1 else options | {"parallel": plan.parallel}


def next_budget(plan: TrainingPlan, used: int | None = None) -> int:
    """Return the most device memory of the plan that follows one with which memory ran out.

    A tenth of what a step needs beside the weights and the process has to be free then.

    Args:
        plan: the former plan.
        used: bytes of the weights and the process, if they are not those of the plan.
    """
    planned: int = plan.phases[0]["bytes"]
    return (planned if used is None else used) + (plan.peak - planned) * 9 // 10


def recorded_plan(run: Run[LoopConfig]) -> TrainingPlan | None:
    """Return the plan that run.json records, or None; raise InputError if it is damaged."""
    plan = _recorded(run).get("plan")
    if plan is None:
        return None
    try:
        return TrainingPlan(plan)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{run.folder / 'run.json'}: plan: {str(error).splitlines()[0]}; give another --out"
        ) from None


@contextmanager
def _own_folder(run: Run[LoopConfig]) -> Iterator[None]:
    """Lock the run folder, and check that it holds no files that do not belong to this run."""
    out, resume = run.folder, run.config.resume
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: exists and is not a directory")
    except OSError as error:  # raised if a permission is missing, or a name is too long
        raise InputError(f"--out {out}: {error.strerror}") from None
    try:
        with locked(out / LOCK, f"--out {out}"):
            names = [path.name for path in out.iterdir() if path.name != LOCK]
            if names and not resume:
                raise InputError(
                    f"--out {out}: the directory is not empty; give another, or --resume to continue the run in it"
                )
            if not (out / "run.json").is_file() and any(not name.endswith(PARTIAL) for name in names):
                raise InputError(f"--resume {out}: not the directory of a run (no run.json in it)")
            yield
    except (Interrupted, KeyboardInterrupt) as error:
        raise Interrupted(getattr(error, "number", signal.SIGINT), _progress_kept(out)) from None


@contextmanager
def begun(run: Run[LoopConfig]) -> Iterator[None]:
    """Write run.json, or check that of the run that is resumed, once the fingerprint of the run is known.

    If the ``with`` block fails before the first step is complete, its files are removed. The function also sets
    the number of threads. By default, a resumed run takes the number that the first run recorded, because the
    order of summation depends on it. In the block, CPU tensors come from the allocator that
    ``--host-allocator`` selects.

    Raises:
        InputError: the folder holds another run.
    """
    out = run.folder
    if not run.processes.is_first:  # the first process writes all files
        run.processes.barrier()
        torch.set_num_threads(_read_record(run)["threads"])
        with run.allocator():
            yield
        return
    recorded = _read_record(run)
    try:
        _begin(run, recorded)
        run.processes.barrier()
        with run.allocator():
            yield
    except BaseException:
        if not recorded and not checkpoints(out) and not (out / "metrics.jsonl").exists():
            for path in out.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        raise


def _recorded(run: Run[LoopConfig]) -> dict[str, Any]:
    """Return the content of run.json, or {} without the file. Raise InputError if it is damaged."""
    path = run.folder / "run.json"
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
    result: dict[str, Any] = recorded
    return result


def _read_record(run: Run[LoopConfig]) -> dict[str, Any]:
    """Return the content of run.json, or {} without the file. Raise InputError if it records another run."""
    recorded = _recorded(run)
    if not recorded:
        return {}
    if recorded["command"] != run.command:
        raise InputError(
            f"--resume {run.folder}: a run of `shoestring {recorded['command']}`, not of `shoestring {run.command}`"
        )
    require_equal(run.fingerprint, recorded["fingerprint"], str(run.folder))
    return recorded


def _begin(run: Run[LoopConfig], recorded: dict[str, Any]) -> None:
    """Set the number of threads, remove partial files of a killed process, and write run.json."""
    threads = run.config.threads or recorded.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    remove_partial(run.folder)
    remove_partial(run.folder / "checkpoints")
    settings = {"threads": threads, "host_allocator": run.uses_host_allocator}
    if any(recorded.get(name) != value for name, value in settings.items()):
        record = {"command": run.command, "torch": torch.__version__, **settings}
        write_json(run.folder / "run.json", recorded | record | {"fingerprint": run.fingerprint})


def with_choices(run: Run[Config], choices: dict[str, Any], plan: TrainingPlan | None = None) -> Run[Config]:
    """Return the run with options that were chosen for it, which the first process writes into run.json.

    Args:
        choices: values of options.
        plan: the plan from which the options are, which a resumed run follows.
    """
    config = replace(run.config, **choices)
    fixed = {name: value for name, value in choices.items() if name in run.fingerprint}
    # A plan may split the weights of a run whose options left this open.
    fixed |= {name: value for name, value in config.fixed().items() if name == "sharded_weights"}
    chosen = replace(run, config=config, fingerprint=run.fingerprint | fixed, plan=plan)
    if run.processes.is_first:
        added: dict[str, Any] = {}
        if plan is not None:
            added = {"plan": plan.to_dict(), "processes": run.processes.count}
        write_json(run.folder / "run.json", _recorded(run) | added | {"fingerprint": chosen.fingerprint})
    return chosen


def _progress_kept(out: Path) -> str:
    """Return a text for the terminal that says what the folder of an interrupted run holds."""
    existing = checkpoints(out)
    if existing:
        return f"checkpoint at step {step_of(existing[-1])}, continue with --resume"
    if (out / "run.json").exists():
        return f"interrupted before the first checkpoint; {out} holds no trained step"
    return "interrupted before the first step; nothing was written"


def prepare_tokens(
    folder: Path, files: list[Path], tokenizer: Any, seed: int, others: tuple[str, ...] = ()
) -> tuple[np.ndarray, int]:
    """Write the tokens of the files to tokens.bin unless the folder has it; return them and the vocabulary's size.

    Args:
        seed: the order of the files follows from it.
        others: names of other files that the run has prepared, which must not have changed either.
    """
    path = folder / "tokens.bin"
    if not path.is_file():
        shuffled = list(files)
        random.Random(seed).shuffle(shuffled)
        write_token_file(path, shuffled, tokenizer)
    require_prepared(folder, [*others, path.name])
    return read_token_file(path)

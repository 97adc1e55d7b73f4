"""A training run: its options, device and processes, and the folder that keeps its files."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shoestring.core.errors import InputError
from shoestring.core.host_allocator import host_allocator
from shoestring.data.token_file import read_token_file, write_token_file
from shoestring.files.atomic import PARTIAL, remove_partial, write_json
from shoestring.files.lock import LOCK, locked
from shoestring.optim.offload import PLACES, is_place
from shoestring.training import memory
from shoestring.training.config import MOST_THREADS, Fingerprint, LoopConfig
from shoestring.training.conflicts import run_conflicts
from shoestring.training.optimizers import check_optimizer
from shoestring.training.options import refuse_together
from shoestring.training.run.checkpoint import checkpoints, step_of
from shoestring.training.run.device import check_precision, find_device
from shoestring.training.run.digests import require_prepared
from shoestring.training.run.processes import Processes, connect
from shoestring.training.run.signals import Interrupted

if TYPE_CHECKING:
    import numpy as np

Config = TypeVar("Config", bound=LoopConfig)
ConfigOfRun = TypeVar("ConfigOfRun", bound=LoopConfig, covariant=True)


@dataclass(frozen=True)
class Run(Generic[ConfigOfRun]):
    """A training run whose options have been checked.

    Attributes:
        config: the options.
        command: "train" or "finetune".
        folder: the folder of ``--out``.
        device: the device of this process.
        processes: the processes of the run.
        fingerprint: the settings that must not change when the run is resumed.
    """

    config: ConfigOfRun
    command: str
    folder: Path
    device: torch.device
    processes: Processes
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    @property
    def uses_host_allocator(self) -> bool:
        """Whether CPU tensors come from the allocator of :func:`shoestring.host_allocator`."""
        if self.config.host_allocator is not None:
            return self.config.host_allocator
        return not self.config.baseline and sys.platform == "linux" and self.device.type == "cpu"

    def allocator(self) -> AbstractContextManager[object]:
        """Return a context in which CPU tensors come from the selected allocator."""
        return host_allocator() if self.uses_host_allocator else nullcontext()


def check_run(config: Config, command: str, out: Path) -> Run[Config]:
    """Check the options of a run, find its device, and connect to its other processes.

    Raises:
        InputError: options contradict each other, --out is unusable, or the processes do not connect.
            Nothing is written then.
    """
    if config.memory_budget is not None:
        memory.parse_budget(config.memory_budget)
    if config.offload != "none" and not is_place(config.offload):
        raise InputError(f"--offload: expected {PLACES}, got {config.offload}")
    refuse_together(run_conflicts(config))
    device = find_device(config.device)
    check_precision(config.precision, config.weights, device)
    check_optimizer(config)
    processes = connect(config)
    if processes.count > 1:  # each process of a machine has taken an accelerator of its own
        device = find_device(config.device)
    if not processes.is_first:
        return Run(config, command, out, device, processes)
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: exists and is not a directory")
        # A lock file means that another process may be using the folder. In that case run_folder() first
        # takes the lock.
        if not (out / LOCK).exists():
            _check_folder(out, config.resume)
    except OSError as error:  # raised if a permission is missing, or a name is too long
        raise InputError(f"--out {out}: {error.strerror}") from None
    return Run(config, command, out, device, processes)


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
def run_folder(run: Run[LoopConfig]) -> Iterator[None]:
    """Lock the run folder, create or check it, and write run.json.

    If the ``with`` block fails before the first step is complete, the files and folders that this function
    made are removed. The function also sets the number of threads. By default, a resumed run takes the number
    that the first run recorded, because the order of summation depends on it. In the block, CPU tensors come
    from the allocator that ``--host-allocator`` selects.

    Raises:
        InputError: another process uses the folder, or the folder holds another run or other files.
        Interrupted: a signal arrived; the text of the exception says what the run folder holds.
    """
    out = run.folder
    if not run.processes.is_first:  # the first process has the lock, and writes all files
        run.processes.barrier()
        torch.set_num_threads(_read_record(run)["threads"])
        with run.allocator():
            yield
        return
    created = [parent for parent in [out, *out.parents] if not parent.exists()]
    try:
        with locked(out / LOCK, f"--out {out}"):
            _check_folder(out, run.config.resume)
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
    except BaseException as error:
        with suppress(OSError):  # rmdir raises OSError if a folder is not empty; such a folder is kept
            for path in created:
                path.rmdir()
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            raise Interrupted(getattr(error, "number", signal.SIGINT), _kept(out)) from None
        raise


def _read_record(run: Run[LoopConfig]) -> dict[str, Any]:
    """Return the content of run.json, or {} without the file. Raise InputError if it records another run."""
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
    if recorded["command"] != run.command:
        raise InputError(
            f"--resume {run.folder}: a run of `shoestring {recorded['command']}`, not of `shoestring {run.command}`"
        )
    run.fingerprint.require_equal(recorded["fingerprint"], str(run.folder))
    result: dict[str, Any] = recorded
    return result


def _begin(run: Run[LoopConfig], recorded: dict[str, Any]) -> None:
    """Set the number of threads, remove partial files of a killed process, and write run.json."""
    threads = run.config.threads or recorded.get("threads") or torch.get_num_threads()
    torch.set_num_threads(threads)
    remove_partial(run.folder)
    remove_partial(run.folder / "checkpoints")
    settings = {"threads": threads, "host_allocator": run.uses_host_allocator}
    if any(recorded.get(name) != value for name, value in settings.items()):
        record = {"command": run.command, "torch": torch.__version__, **settings}
        write_json(run.folder / "run.json", {**record, "fingerprint": run.fingerprint.values})


def _kept(out: Path) -> str:
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

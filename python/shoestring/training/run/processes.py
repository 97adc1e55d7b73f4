"""The processes of one training run, which torchrun has started.

The first process writes all files of the run. The others read what it has prepared.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from shoestring.core.dtensors import is_dtensor
from shoestring.core.errors import InputError
from shoestring.distributed.groups import backends, start_group
from shoestring.distributed.parallelize import ParallelReport, parallelize
from shoestring.training.config import LoopConfig, PlanConfig
from shoestring.training.conflicts import check_shares
from shoestring.training.options import environment_number

Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """This process's number among the processes of the run, and their number."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and talks to the terminal."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            dist.barrier()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block in the first process, and then in the others."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def from_first(self, find: Callable[[], Value]) -> Value:
        """Return in all processes what a function returns in the first one, as values of JSON.

        Raises:
            InputError: the function has failed in the first process, which raises its own error.
        """
        if self.count == 1:
            return find()
        if not self.is_first:
            found: dict[str, Any] = json.loads(_sent_by_first(None))
            if "error" in found:
                raise InputError(found["error"])
            value: Value = found["value"]
            return value
        try:
            value = find()
            text = json.dumps({"value": value})
        except BaseException as error:
            # The others must not wait for a process that ends.
            reason = str(error).partition("\n")[0] or type(error).__name__
            with suppress(RuntimeError):
                _sent_by_first(json.dumps({"error": reason}))
            raise
        _sent_by_first(text)
        return value

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self.count == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each element of a tensor over the processes."""
        if self.count == 1:
            return values
        largest = values.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds in any process."""
        return condition if self.count == 1 else bool(self.total(torch.tensor(float(condition))).item())

    def of_all(self, value: int) -> list[int]:
        """Return a number of each process."""
        numbers = torch.zeros(self.count, dtype=torch.int64)
        numbers[self.rank] = value
        return [int(number) for number in self.total(numbers).tolist()]


def _sent_by_first(text: str | None) -> str:
    """Return the text of the first process in all processes."""
    box = [text]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    sent = box[0]
    assert sent is not None
    return sent


def connect(config: LoopConfig) -> Processes:
    """Connect to the other processes that torchrun has started.

    Raises:
        InputError: there are several processes and no ``--parallel``, or a strategy without torchrun, the
            environment is damaged, or the other processes do not come.
    """
    count = environment_number("WORLD_SIZE", 1)
    if isinstance(config, PlanConfig):  # nothing is trained
        return Processes()
    if config.parallel == "none":
        if count > 1:
            raise InputError(
                f"--parallel: expected auto, ddp, zero1, zero2, zero3 or hsdp in a run of {count} processes, got none"
            )
        return Processes()
    if "WORLD_SIZE" not in os.environ and config.parallel != "auto":
        raise InputError(
            f"--parallel {config.parallel}: expected processes that torchrun has started, got one process without it; "
            "start the command with torchrun --nproc-per-node N --no-python, or leave --parallel out"
        )
    check_shares(config.accumulate, count)
    if count == 1:
        return Processes()
    if (
        config.parallel == "hsdp"
        and config.compress != "none"
        and environment_number("LOCAL_WORLD_SIZE", count) == count
    ):
        raise InputError(
            f"--compress {config.compress}: expected several machines with --parallel hsdp, which compresses gradients "
            "between machines alone, got one; take --parallel zero3"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = "gloo"
    if config.device not in ("auto", "cpu") and config.device != (accelerator.type if accelerator else ""):
        raise InputError(
            f"--device: expected auto, cpu or the name of an accelerator with --parallel, got {config.device}"
        )
    if config.device != "cpu" and accelerator is not None:
        local = environment_number("LOCAL_RANK", 0)
        if local >= torch.accelerator.device_count():
            raise InputError(
                f"--parallel: expected a device for each process of a machine, got {torch.accelerator.device_count()} "
                f"for process {local}; start fewer, or take --device cpu"
            )
        torch.accelerator.set_device_index(local)
        backend = backends(accelerator.type)
    try:
        rank, count = start_group(backend)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"--parallel {config.parallel}: the processes do not connect: {str(error).splitlines()[0]}; start the command "
            "with torchrun"
        ) from None
    return Processes(rank, count)


def disconnect(processes: Processes) -> None:
    """Leave the process group, after the model is gone.

    A model that holds the group keeps its threads alive. One of them may then free a tensor while the interpreter ends,
    which ends the process with an error.
    """
    if processes.count > 1:
        gc.collect()
        dist.destroy_process_group()


def parallel(model: nn.Module, config: LoopConfig, processes: Processes) -> ParallelReport | None:
    """Prepare the model for training by all processes; return None for one process."""
    if processes.count == 1:
        return None
    compress = None if config.compress == "none" else config.compress
    try:
        return parallelize(model, config.parallel, compress=compress, offload=config.weights_place)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"--parallel {config.parallel}: {str(error).splitlines()[0]}") from None


def whole(value: Any, keep: bool = True) -> Any:
    """Replace the DTensors in a state by whole tensors, which all processes gather.

    A process that does not ``keep`` them gets None in their places.
    """

    def gather(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        gathered = leaf.full_tensor()
        return gathered if keep else None

    return _pytree.tree_map(gather, value)

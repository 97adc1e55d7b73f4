"""Find the largest batch that fits into memory, and say what would have fitted after a failure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoestring.core.device import is_asynchronous
from shoestring.core.process_memory import peak_bytes, reset_peak, resident_bytes, return_freed, spare_bytes
from shoestring.core.storages import storages, tensors_in
from shoestring.optim.several import several
from shoestring.runs.run_copy import RunCopy
from shoestring.runs.training_file import Stateful

# The share of the free memory of a CPU that a trial may be expected to take.
USABLE = 0.9


@dataclass(frozen=True)
class BatchTrial:
    """One size that ``find_batch_size`` has looked at.

    Attributes:
        batch_size: the number of rows.
        fits: whether two steps have succeeded.
        bytes: the memory that the trial took above what was in use before. It is a prediction if the trial was not
            run, and 0 if it failed.
        was_run: whether the size was tried. On a CPU, sizes that cannot fit are not tried, because the system would
            end the process.

    Example:
        >>> shoestring.BatchTrial(batch_size=8, fits=True, bytes=4096, was_run=True).fits
        True
    """

    batch_size: int
    fits: bool
    bytes: int
    was_run: bool


@dataclass(frozen=True)
class BatchSizeSearch:
    """The result of ``find_batch_size``.

    Attributes:
        batch_size: the largest number of rows that fits. It has been tried.
        trials: all sizes that were looked at, in their order.

    Example:
        >>> shoestring.BatchSizeSearch(batch_size=8, trials=()).batch_size
        8
    """

    batch_size: int
    trials: tuple[BatchTrial, ...]


def find_batch_size(
    step: Callable[[int], object],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    at_most: int,
    at_least: int = 1,
    multiple_of: int = 1,
    memory: int | None = None,
    **parts: Stateful,
) -> BatchSizeSearch:
    """Return the largest batch size with which a training step fits into memory.

    Sizes are doubled until one does not fit, and then bisected. Each trial takes two steps, because the first one
    creates gradients and optimizer state while the second one has them from the beginning. Afterwards weights,
    buffers, gradients, states and random numbers are as before, bit for bit, and modules are in the mode of training or
    evaluation that they had. A copy is kept in host memory meanwhile, which the search therefore does not count as free.

    Args:
        step: takes one training step on this number of rows. Use the longest rows of the data: a size that was found
            with short ones fails later.
        model: the module that ``step`` trains.
        optimizers: the optimizers that ``step`` steps.
        at_most: the largest size to try.
        at_least: the smallest size that is of use.
        multiple_of: only multiples of this number are tried.
        memory: the bytes that a step may take on a CPU above what is in use; by default 90 % of what the machine,
            or the control group of the process, has left. On a GPU, its allocator decides.
        **parts: objects with ``state_dict`` and ``load_state_dict`` that ``step`` changes.

    Returns:
        A :class:`BatchSizeSearch`.

    Raises:
        ValueError: a size is out of range.
        RuntimeError: not even ``at_least`` fits. The message says what is in the way.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = shoestring.optim.AdamW(model.parameters())
        >>> def step(rows):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(rows, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> shoestring.find_batch_size(step, model, optimizer, at_most=64).batch_size
        64
    """
    every = several(optimizers)
    sizes: Any = torch.classes.shoestring.BatchSizes(at_most, at_least, multiple_of, memory)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    copy = RunCopy("find_batch_size", model, every, parts)
    trials: list[BatchTrial] = []
    while (rows := sizes.next()) is not None:
        trials.append(_try(step, rows, sizes, device, memory, copy))
        sizes.add(rows, trials[-1].fits, trials[-1].bytes, trials[-1].was_run)
    _clear(device)
    if sizes.best() == 0:
        advice = memory_advice(
            model, every, batch_size=trials[-1].batch_size, needed=trials[-1].bytes or None
        )
        raise RuntimeError(
            f"find_batch_size: at_least: expected a size that fits, received {at_least}, which does not. {advice}"
        )
    return BatchSizeSearch(sizes.best(), tuple(trials))


def _try(
    step: Callable[[int], object],
    rows: int,
    sizes: Any,
    device: torch.device,
    memory: int | None,
    copy: RunCopy,
) -> BatchTrial:
    """Take two steps on so many rows, unless they cannot fit, and restore the copy."""
    _clear(device)
    is_gpu = is_asynchronous(device)
    limit = 0 if is_gpu else memory or int(USABLE * spare_bytes()[1])
    expected = 0 if is_gpu else sizes.expected(rows)
    if expected > limit:
        return BatchTrial(rows, False, expected, was_run=False)
    if is_gpu:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
    else:
        reset_peak()
        before = resident_bytes()
    try:
        step(rows)
        step(rows)
        peak_growth = (torch.accelerator.max_memory_allocated(device) if is_gpu else peak_bytes()) - before
        fits = is_gpu or peak_growth <= limit
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        peak_growth, fits = 0, False
    finally:
        copy.restore()
    return BatchTrial(rows, fits, peak_growth, was_run=True)


def _clear(device: torch.device) -> None:
    gc.collect()
    if is_asynchronous(device):
        torch.accelerator.empty_cache()
    else:
        return_freed()  # else a step takes memory that an earlier one has freed, which no measurement sees


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(
        torch.classes.shoestring.BatchSizes.says_out_of_memory(str(error))
    )


# ---- advice


@dataclass(frozen=True)
class MemoryAdvice:
    """The memory that a training step needs, and what would have fitted. ``str()`` says it in sentences.

    Attributes:
        total: the bytes of memory of the device.
        weights: the bytes of parameters and buffers.
        gradients: the bytes of the gradients of all trainable parameters.
        state: the bytes of the optimizers' state, or of the state that AdamW in 8 bits would have before a
            first step.
        activations: the bytes of everything else that the step needed, or None if that is not known.
        batch_size: the number of rows of the step that failed, or None.
        fitting: the number of rows that would have fitted, or None if that is not known.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> shoestring.memory_advice(model).weights
        36
    """

    total: int
    weights: int
    gradients: int
    state: int
    activations: int | None
    batch_size: int | None
    fitting: int | None
    parameters: int
    has_state: bool

    def __str__(self) -> str:
        sizes = [self.total, self.weights, self.gradients, self.state, self.parameters]
        text: str = torch.ops.shoestring._memory_advice_text(
            sizes, self.has_state, self.batch_size, self.activations, self.fitting
        )
        return text


def memory_advice(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    batch_size: int | None = None,
    error: BaseException | None = None,
    needed: int | None = None,
) -> MemoryAdvice:
    """Compute what would have fitted when a training step ran out of memory.

    Args:
        model: the model that was trained.
        optimizers: its optimizers.
        batch_size: the number of rows of the step that failed.
        error: the exception. On a GPU, its message says how much more was asked for.
        needed: the bytes that the step took at its peak, if they are known from elsewhere.

    Returns:
        A :class:`MemoryAdvice`; print it.

    Example:
        >>> model = torch.nn.Linear(1024, 1024)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> try:
        ...     raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        ... except torch.OutOfMemoryError as error:
        ...     advice = shoestring.memory_advice(model, optimizer, batch_size=8, error=error)
        >>> advice.gradients
        4198400
    """
    every = several(optimizers)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parameters = sum(p.numel() for p in trained)
    weights = sum(storages([*model.parameters(), *model.buffers()]).values())
    gradients = sum(p.numel() * p.element_size() for p in trained)
    states = tensors_in([optimizer.state_dict()["state"] for optimizer in every])
    state = sum(storages(states).values())
    if is_asynchronous(device):
        total = torch.accelerator.get_memory_info(device)[1]
        if needed is None:
            needed = torch.accelerator.max_memory_allocated(device)
    else:
        total = spare_bytes()[0]
    state, activations, fitting = torch.ops.shoestring._memory_advice(
        [total, weights, gradients, state, parameters], bool(states), batch_size, needed, str(error)
    )
    return MemoryAdvice(
        total, weights, gradients, state, activations, batch_size, fitting, parameters, bool(states)
    )

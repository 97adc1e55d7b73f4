"""Find the largest batch that fits into memory, and say what would have fitted after a failure."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from shoestring.core.device import is_asynchronous
from shoestring.core.process_memory import peak_bytes, reset_peak, resident_bytes, spare_bytes
from shoestring.core.storages import storages, tensors_in
from shoestring.runs.run_copy import RunCopy
from shoestring.runs.training_file import Stateful, several

GIB = 2**30
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
    buffers, gradients, states and random numbers are as before, bit for bit; a copy is kept in host memory
    meanwhile, which the search therefore does not count as free.

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
    smallest = -(-max(at_least, 1) // multiple_of) if multiple_of >= 1 else 0
    for good, name, expected, received in [
        (multiple_of >= 1, "multiple_of", "a number of at least 1", multiple_of),
        (at_least >= 1, "at_least", "a number of at least 1", at_least),
        (
            at_most // max(multiple_of, 1) >= smallest,
            "at_most",
            f"at least {smallest * multiple_of}",
            at_most,
        ),
        (memory is None or memory > 0, "memory", "None or a number of bytes above 0", memory),
    ]:
        if not good:
            raise ValueError(f"find_batch_size: {name}: expected {expected}, received {received}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    copy = RunCopy(model, every, parts)
    search = _Search(step, device, memory, copy, multiple_of)
    try:
        best = search.largest(smallest, at_most // multiple_of)
    finally:
        copy.restore()
    if best == 0:
        trial = search.trials[-1]
        advice = memory_advice(model, every, batch_size=trial.batch_size, needed=trial.bytes or None)
        raise RuntimeError(
            f"find_batch_size: at_least: expected a size that fits, received {at_least}, which does not. {advice}"
        )
    return BatchSizeSearch(best * multiple_of, tuple(search.trials))


class _Search:
    def __init__(
        self,
        step: Callable[[int], object],
        device: torch.device,
        memory: int | None,
        copy: RunCopy,
        unit: int,
    ) -> None:
        self._step, self._device, self._memory = step, device, memory
        self._copy, self._unit = copy, unit
        self.trials: list[BatchTrial] = []

    def largest(self, smallest: int, most: int) -> int:
        """Return the largest number of units that fits, or 0 if the smallest does not."""
        fitting, size = 0, smallest
        while self.fits(size):
            fitting = size
            if size == most:
                return size
            size = min(2 * size, most)
        failing = size
        while fitting and failing - fitting > 1:
            size = (fitting + failing) // 2
            if self.fits(size):
                fitting = size
            else:
                failing = size
        return fitting

    def fits(self, units: int) -> bool:
        rows = units * self._unit
        self._clear()
        is_gpu = is_asynchronous(self._device)
        limit = 0 if is_gpu else self._memory or int(USABLE * spare_bytes()[1])
        expected = 0 if is_gpu else self._expected(rows)
        if expected > limit:
            self.trials.append(BatchTrial(rows, False, expected, was_run=False))
            return False
        before = self._start()
        try:
            self._step(rows)
            self._step(rows)
            taken = self._peak() - before
            fits = is_gpu or taken <= limit
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            taken, fits = 0, False
        self._copy.restore()
        self._clear()
        self.trials.append(BatchTrial(rows, fits, taken, was_run=True))
        return fits

    def _expected(self, rows: int) -> int:
        """Return the bytes that so many rows take, from the line through the last two trials."""
        done = [trial for trial in self.trials if trial.was_run and trial.bytes > 0]
        if not done:
            return 0
        last = done[-1]
        if len(done) == 1:
            return last.bytes * rows // last.batch_size
        before = done[-2]
        slope = max(0.0, (last.bytes - before.bytes) / (last.batch_size - before.batch_size))
        return int(last.bytes + slope * (rows - last.batch_size))

    def _clear(self) -> None:
        gc.collect()
        if is_asynchronous(self._device):
            torch.accelerator.synchronize(self._device)
            torch.accelerator.empty_cache()

    def _start(self) -> int:
        if is_asynchronous(self._device):
            torch.accelerator.reset_peak_memory_stats(self._device)
            return torch.accelerator.memory_allocated(self._device)
        reset_peak()
        return resident_bytes()

    def _peak(self) -> int:
        if is_asynchronous(self._device):
            return torch.accelerator.max_memory_allocated(self._device)
        return peak_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search("out of memory|can't allocate memory|not enough memory", str(error))
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
        fixed = self.weights + self.gradients + self.state
        parts = (
            f"weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, optimizer state {_gib(self.state)}"
            + ("" if self.has_state else " (as AdamW in 8 bits would have)")
        )
        said = [f"The device has {_gib(self.total)}. A step holds {parts}"]
        if self.activations is not None:
            rows = "" if self.batch_size is None else f" for {self.batch_size} rows"
            said[0] += f", and needed at least {_gib(self.activations)} of activations{rows}"
        room = self.total - fixed
        if self.fitting:
            said.append(
                f"A micro-batch of {self.fitting} rows would have fitted; accumulate() adds up several"
            )
        if self.activations is not None and 0 < room < self.activations:
            said.append(f"So would checkpoint_model(model, memory_budget={room})")
        small = int(2.03 * self.parameters)
        if self.has_state and self.state > 1.5 * small:
            said.append(
                f"An optimizer of shoestring.optim with 8-bit state would save {_gib(self.state - small)}"
            )
        if self.has_state and self.state:
            said.append(f'offload="cpu" would take {_gib(self.state)} of state off the device')
        if room <= 0 and self.weights > self.total // 4:
            said.append(
                "offload_weights(model) keeps all blocks but two elsewhere, and adapters need no gradients of weights"
            )
        return ". ".join(said) + "."


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
    state = sum(storages(states).values()) if states else int(2.03 * parameters)
    fixed = weights + gradients + state
    if is_asynchronous(device):
        total = torch.accelerator.get_memory_info(device)[1]
        if needed is None:
            needed = torch.accelerator.max_memory_allocated(device)
    else:
        total = spare_bytes()[0]
    if needed is not None:
        needed += _asked(error)
    activations = None if needed is None else max(0, needed - fixed)
    fitting = None
    if activations and batch_size is not None and total > fixed:
        rows = (total - fixed) * batch_size // activations
        fitting = min(rows, batch_size - 1) or None
    return MemoryAdvice(
        total, weights, gradients, state, activations, batch_size, fitting, parameters, bool(states)
    )


def _asked(error: BaseException | None) -> int:
    """Return the bytes that an allocation asked for when it failed, from the message of the allocator."""
    asked = re.search(r"Tried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)", str(error))
    if asked is None:
        return 0
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
    return int(float(asked[1]) * units[asked[2]])


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / 2**20:.1f} MiB"

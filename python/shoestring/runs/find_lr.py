"""Find a learning rate by trying many of them in short runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.files.write_file import naming
from shoestring.optim.host_copy import call_all
from shoestring.optim.several import several
from shoestring.runs.run_copy import RunCopy
from shoestring.runs.training_file import Stateful


@dataclass(frozen=True)
class LrPass:
    """The losses of one pass over the learning rates.

    Attributes:
        lrs: the learning rate of each step.
        losses: the loss of each step.
        steepest: the rate at which the smoothed loss falls most steeply.
        tenth: a tenth of the rate at which the smoothed loss is least.

    Example:
        >>> shoestring.LrPass(lrs=(1e-3,), losses=(2.0,), steepest=1e-3, tenth=1e-4).steepest
        0.001
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    steepest: float
    tenth: float


@dataclass(frozen=True)
class LrRange:
    """The result of ``find_lr``.

    Attributes:
        passes: the losses and rates of each pass.
        suggestion: the geometric mean of the passes' steepest rates.
        spread: the largest steepest rate over the least. Far above 1, the suggestion depends on chance.

    Example:
        >>> one = shoestring.LrPass(lrs=(1e-3,), losses=(2.0,), steepest=1e-3, tenth=1e-4)
        >>> shoestring.LrRange(passes=(one,), suggestion=1e-3, spread=1.0).suggestion
        0.001
    """

    passes: tuple[LrPass, ...]
    suggestion: float
    spread: float

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw loss against learning rate into a file. This needs matplotlib.

        Args:
            path: the file; its ending selects the format, such as ``.png`` or ``.svg``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss")
        for number, one in enumerate(self.passes):
            axes.plot(one.lrs, one.losses, label=f"pass {number + 1}")
        axes.axvline(self.suggestion, color="black", linestyle="--", label=f"steepest: {self.suggestion:.2g}")
        axes.legend()
        with naming(path):
            figure.savefig(path)


def find_lr(
    step: Callable[[], Tensor | float],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    start: float = 1e-7,
    end: float = 10.0,
    steps: int = 100,
    passes: int = 2,
    **parts: Stateful,
) -> LrRange:
    """Try learning rates in short runs whose rate grows exponentially with each step.

    The rate at which the loss falls most steeply is a good peak of a schedule. Afterwards weights (of the model and of
    the optimizers), buffers, gradients, states of optimizers, parts and random numbers are as before, bit for bit, also
    if ``step`` raises. So is the mode of training or evaluation. A copy is kept in host memory meanwhile.

    Args:
        step: takes one training step, with a call that clears the gradients, and returns the loss. It must leave
            the learning rate alone, so it contains no step of a schedule.
        model: the module that ``step`` trains.
        optimizers: the optimizers that ``step`` steps. The rates are those of the group with the highest rate;
            other groups keep their ratio to it.
        start: the first learning rate.
        end: the last one. A pass ends before if the smoothed loss is not finite, or above 4 times the least one.
        steps: the number of steps of a pass, at least 10.
        passes: the number of passes, each with other random numbers. Their spread tells what chance does.
        **parts: objects with ``state_dict`` and ``load_state_dict`` that ``step`` changes, such as a data loader
            or a GradScaler.

    Returns:
        An :class:`LrRange` with rates, losses and the suggestion.

    Raises:
        ValueError: an argument is out of range, ``step`` returns no loss or sets the learning rate, or the loss
            never fell.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = shoestring.optim.AdamW(model.parameters())
        >>> x = torch.randn(64, 8)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> result = shoestring.find_lr(step, model, optimizer, start=1e-4)
        >>> 1e-4 < result.suggestion < 10
        True

    Reference: L. Smith, Cyclical learning rates for training neural networks, arXiv 1506.01186.
    """
    every = several(optimizers)
    for good, name, expected, received in [
        (start > 0 and math.isfinite(end), "start", "a number above 0", start),
        (end > start, "end", f"a number above start, {start}", end),
        (steps >= 10, "steps", "a number of at least 10", steps),
        (passes >= 1, "passes", "a number of at least 1", passes),
    ]:
        if not good:
            raise ValueError(f"find_lr: {name}: expected {expected}, received {received}")
    former = [group["lr"] for group in _groups(every)]
    first = [float(lr) for lr in former]
    if not first or max(first) <= 0:
        raise ValueError("find_lr: optimizers: expected a learning rate above 0, received none")
    shares = [lr / max(first) for lr in first]
    rates = [start * (end / start) ** (i / (steps - 1)) for i in range(steps)]
    copy = RunCopy("find_lr", model, every, parts)
    tried = []
    try:
        for number in range(passes):
            if number:
                copy.restore()
                torch.manual_seed(number)
            tried.append(_one_pass(step, _groups(every), shares, rates))
    finally:
        call_all([copy.restore, lambda: _set_all(_groups(every), former, first)])
    steepest = [one.steepest for one in tried]
    suggestion = math.exp(sum(map(math.log, steepest)) / passes)
    return LrRange(tuple(tried), suggestion, max(steepest) / min(steepest))


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    # Optimizers replace their groups when they load a state.
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _one_pass(
    step: Callable[[], Tensor | float], groups: list[dict[str, Any]], shares: list[float], rates: list[float]
) -> LrPass:
    """Run a step with each learning rate until the loss diverges."""
    lrs: list[float] = []
    losses: list[float] = []
    for rate in rates:
        for group, share in zip(groups, shares, strict=True):
            _set(group, rate * share)
        set_rates = [float(group["lr"]) for group in groups]
        loss = step()
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"find_lr: step: expected a function that returns one loss, received a tensor of shape {tuple(loss.shape)}"
            )
        if not isinstance(loss, (Tensor, float, int)):
            raise ValueError(
                f"find_lr: step: expected a function that returns one loss, received {type(loss).__name__}"
            )
        for group, expected in zip(groups, set_rates, strict=True):
            if float(group["lr"]) != expected:
                raise ValueError(
                    "find_lr: step: expected a step that leaves the learning rate alone, received one that has set it to "
                    f"{float(group['lr'])}. Leave out the schedule"
                )
        lrs.append(rate)
        losses.append(float(loss.detach()) if isinstance(loss, Tensor) else float(loss))
        if torch.classes.shoestring.LrPass.diverges(losses):
            break
    judged = torch.classes.shoestring.LrPass(lrs, losses)
    return LrPass(tuple(lrs), tuple(losses), judged.steepest(), judged.tenth())


def _set_all(groups: list[dict[str, Any]], former: list[Any], values: list[float]) -> None:
    """Give groups their former learning rates back, with the values that these had."""
    for group, lr, value in zip(groups, former, values, strict=True):
        group["lr"] = lr  # a tensor remains the same object
        _set(group, value)


def _set(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr

"""Schedules of the learning rate and of other options, as pure functions of the step.

A run that resumes needs only the number of its step. The values are computed in C++, where
``shoestring::optim::schedules`` has the same functions.

With a warm-up of w of the n steps, ``x = (step - w) / (n - w)`` is the share of the steps after it. Step 0 has the
value ``warmup_start`` times the peak, or ``1 / (w + 1)`` times the peak, and step w has the peak. Without ``peak``, a
schedule gives factors, by which ``Scheduler`` multiplies the value that an option had at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = [
    "ReduceOnPlateau",
    "Schedule",
    "Scheduler",
    "constant",
    "cosine",
    "flat_cos",
    "inverse_sqrt",
    "linear",
    "one_cycle",
    "polynomial",
    "wsd",
]

WHOLE = ("steps", "warmup", "cycles", "timescale")


class Schedule:
    """A value as a function of the step. The functions of this module make schedules.

    Args:
        name: the name of a function of this module.
        options: the arguments of that function; None stands for an argument that is not given.

    Raises:
        ValueError: an option is out of range, or the schedule does not take it.

    Example:
        >>> schedule = shoestring.optim.schedules.Schedule("linear", steps=4, peak=8.0)
        >>> [schedule(step) for step in range(5)]
        [8.0, 6.0, 4.0, 2.0, 0.0]
    """

    def __init__(self, name: str, **options: float | str | None) -> None:
        self.name = name
        self.options = {key: value for key, value in options.items() if value is not None}
        shape = self.options.get("shape")
        for key in WHOLE:
            value = self.options.get(key)
            if value is not None and (isinstance(value, (str, bool)) or value != int(value)):
                raise ValueError(f"{name}: {key}: expected a whole number, received {value!r}")
        wholes = {key: int(value) for key, value in self.options.items() if key in WHOLE}
        numbers = {key: float(value) for key, value in self.options.items() if key not in (*WHOLE, "shape")}
        self._core = torch.classes.shoestring.Schedule(name, numbers, wholes, shape)

    @property
    def is_absolute(self) -> bool:
        """Whether the values are those of the option itself, and not factors of its first value."""
        return "peak" in self.options

    def __call__(self, step: int) -> float:
        """Return the value of a step, counted from 0.

        Raises:
            ValueError: the step is negative.
        """
        value: float = self._core.value(step)
        return value

    def whole(self, step: int, multiple_of: int = 1) -> int:
        """Return the value of a step as a whole number, for a batch size or a sequence length.

        Returns:
            The largest multiple of ``multiple_of`` that is not above the value, and at least ``multiple_of``.

        Example:
            >>> batch_size = shoestring.optim.schedules.constant(peak=256, warmup=100, warmup_start=0.125)
            >>> [batch_size.whole(step, multiple_of=32) for step in (0, 50, 100)]
            [32, 128, 256]
        """
        value: int = self._core.whole(step, multiple_of)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.name, self.options)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def _made(name: str, options: dict[str, float | str]) -> Schedule:
    return Schedule(name, **options)


def constant(*, warmup: int = 0, warmup_start: float | None = None, peak: float | None = None) -> Schedule:
    """Return a schedule that stays at the peak after the warm-up.

    Args:
        warmup: number of steps in which the value rises linearly to the peak.
        warmup_start: the value of step 0, as a fraction of the peak. None stands for ``1 / (warmup + 1)``.
        peak: the highest value, or None for a schedule of factors.

    Example:
        >>> shoestring.optim.schedules.constant(warmup=3, peak=1.0)(0)
        0.25
    """
    return Schedule("constant", warmup=warmup, warmup_start=warmup_start, peak=peak)


def linear(
    steps: int,
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    end: float = 0.0,
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that falls linearly: ``peak * (1 - x * (1 - end))``.

    Args:
        steps: number of steps of the training, including those of the warm-up.
        warmup: as in ``constant``; also warmup_start and peak.
        warmup_start: see ``warmup``.
        end: the value at the end, as a fraction of the peak.
        peak: see ``warmup``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> shoestring.optim.schedules.linear(100, end=0.5)(50)
        0.75
    """
    return Schedule("linear", steps=steps, warmup=warmup, warmup_start=warmup_start, end=end, peak=peak)


def cosine(
    steps: int,
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    end: float = 0.0,
    cycles: int = 1,
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that falls along half a cosine: ``peak * (end + (1 - end) * (1 + cos(pi * x)) / 2)``.

    Args:
        steps: as in ``linear``; also warmup, warmup_start, end and peak.
        warmup: see ``steps``.
        warmup_start: see ``steps``.
        end: see ``steps``.
        cycles: number of equal cycles, each of which falls from the peak to the end (warm restarts).
        peak: see ``steps``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> round(shoestring.optim.schedules.cosine(100)(50), 12)
        0.5

    Reference:
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, arXiv 1608.03983.
    """
    return Schedule(
        "cosine", steps=steps, warmup=warmup, warmup_start=warmup_start, end=end, cycles=cycles, peak=peak
    )


def one_cycle(
    steps: int,
    *,
    start: float = 1 / 25,
    rise: float = 0.3,
    end: float = 1 / 250_000,
    shape: str = "cosine",
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that rises from ``start`` to the peak, and falls to ``end``.

    The last step has the value of the end. For a momentum that does the opposite, take the lowest momentum as the
    peak, and a start and an end above 1.

    Args:
        steps: number of steps of the training.
        start: the value of step 0, as a fraction of the peak.
        rise: share of the steps in which the value rises.
        end: the value of the last step, as a fraction of the peak.
        shape: "cosine" or "linear".
        peak: as in ``constant``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> momentum = shoestring.optim.schedules.one_cycle(100, peak=0.85, start=0.95 / 0.85, end=0.95 / 0.85)
        >>> [round(momentum(step), 6) for step in (0, 29, 99)]
        [0.95, 0.85, 0.95]

    Reference:
        Smith & Topin, Super-Convergence, arXiv 1708.07120.
    """
    return Schedule("one_cycle", steps=steps, start=start, rise=rise, end=end, shape=shape, peak=peak)


def flat_cos(
    steps: int,
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    flat: float = 0.72,
    end: float = 0.0,
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that stays at the peak, then falls as ``cosine`` does.

    Args:
        steps: as in ``linear``; also warmup, warmup_start, end and peak.
        warmup: see ``steps``.
        warmup_start: see ``steps``.
        flat: share of the steps after the warm-up that have the peak's value.
        end: see ``steps``.
        peak: see ``steps``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> schedule = shoestring.optim.schedules.flat_cos(100, flat=0.5)
        >>> schedule(50), round(schedule(75), 12), schedule(100)
        (1.0, 0.5, 0.0)
    """
    return Schedule(
        "flat_cos", steps=steps, warmup=warmup, warmup_start=warmup_start, flat=flat, end=end, peak=peak
    )


def wsd(
    steps: int,
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    decay: float = 0.2,
    end: float = 0.0,
    shape: str = "linear",
    peak: float | None = None,
) -> Schedule:
    """Return the schedule warm-up, stable, decay: the peak, then a decay in the last share of the steps.

    Args:
        steps: as in ``linear``; also warmup, warmup_start, end and peak.
        warmup: see ``steps``.
        warmup_start: see ``steps``.
        decay: share of the steps after the warm-up in which the value decays.
        end: see ``steps``.
        shape: "linear", "cosine", or "sqrt" for ``1 - sqrt(share of the decay)``.
        peak: see ``steps``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> schedule = shoestring.optim.schedules.wsd(100, warmup=10, decay=0.5)
        >>> [round(schedule(step), 3) for step in (0, 10, 55, 100)]
        [0.091, 1.0, 1.0, 0.0]

    Reference:
        Hu et al., MiniCPM, arXiv 2404.06395. Hägele et al., arXiv 2405.18392, describe the shape "sqrt".
    """
    return Schedule(
        "wsd",
        steps=steps,
        warmup=warmup,
        warmup_start=warmup_start,
        decay=decay,
        end=end,
        shape=shape,
        peak=peak,
    )


def inverse_sqrt(
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    timescale: int | None = None,
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that falls as ``sqrt(timescale / (timescale + step - warmup))``. It needs no end.

    Args:
        warmup: as in ``constant``; also warmup_start and peak.
        warmup_start: see ``warmup``.
        timescale: number of steps after which the value has fallen to ``1 / sqrt(2)`` of the peak. None stands for
            ``warmup``, or for 10,000 without a warm-up.
        peak: see ``warmup``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> shoestring.optim.schedules.inverse_sqrt(warmup=100)(400)
        0.5
    """
    return Schedule("inverse_sqrt", warmup=warmup, warmup_start=warmup_start, timescale=timescale, peak=peak)


def polynomial(
    steps: int,
    *,
    warmup: int = 0,
    warmup_start: float | None = None,
    power: float = 1.0,
    end: float = 0.0,
    peak: float | None = None,
) -> Schedule:
    """Return a schedule that falls as a power: ``peak * (end + (1 - end) * (1 - x) ** power)``.

    Args:
        steps: as in ``linear``; also warmup, warmup_start, end and peak.
        warmup: see ``steps``.
        warmup_start: see ``steps``.
        power: the power.
        end: see ``steps``.
        peak: see ``steps``.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> shoestring.optim.schedules.polynomial(100, power=2)(50)
        0.25
    """
    return Schedule(
        "polynomial", steps=steps, warmup=warmup, warmup_start=warmup_start, power=power, end=end, peak=peak
    )


PerGroup = Callable[[int], float] | Sequence[Callable[[int], float]]


class Scheduler(LRScheduler):
    """Set options of an optimizer's groups from schedules.

    It is a scheduler of PyTorch, so that trainers take it. Its state is the number of its step, and the first values
    of the options, so a resumed run has bitwise the values of an uninterrupted one.

    Args:
        optimizer: any optimizer.
        schedules: for each option a schedule, or a list with one for each group. The options are lr, weight_decay,
            momentum and all other numbers in the groups; beta1, beta2 and beta3 are the elements of betas. A schedule
            without ``peak``, or any function of the step, gives factors of the option's first value.

    Raises:
        ValueError: an option does not exist, or a value is out of range. Nothing has changed then.

    Example:
        >>> from shoestring.optim import schedules
        >>> optimizer = shoestring.optim.AdamW(torch.nn.Linear(8, 2).parameters(), lr=1e-3)
        >>> scheduler = schedules.Scheduler(
        ...     optimizer, lr=schedules.wsd(1000, warmup=100), beta2=schedules.linear(1000, peak=0.95, end=1.04)
        ... )
        >>> for _ in range(100):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.001
    """

    def __init__(self, optimizer: Optimizer, **schedules: PerGroup) -> None:
        groups = optimizer.param_groups
        self._schedules: dict[str, list[Callable[[int], float]]] = {}
        self._first: dict[str, list[float]] = {}
        for option, schedule in schedules.items():
            several = [schedule] * len(groups) if callable(schedule) else list(schedule)
            if len(several) != len(groups):
                raise ValueError(
                    f"Scheduler: {option}: expected one schedule, or one for each of the {len(groups)} groups, "
                    f"received {len(several)}"
                )
            self._schedules[option] = several
            self._first[option] = [_number(group, option) for group in groups]
            for g, group in enumerate(groups):  # a default of the optimizer is one tensor for all groups
                value = group.get(option)
                if isinstance(value, Tensor) and any(value is other.get(option) for other in groups[:g]):
                    group[option] = value.clone()
        super().__init__(optimizer)  # sets the values of step 0

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Set the values of the next step, or of step ``epoch``."""
        step = self.last_epoch + 1 if epoch is None else epoch
        self._apply(step)
        self.last_epoch = step
        self._step_count = getattr(self, "_step_count", 0) + 1
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _apply(self, step: int) -> None:
        groups = self.optimizer.param_groups
        known = next(iter(self._schedules.values()), groups)
        if len(groups) != len(known):
            raise ValueError(
                f"Scheduler: optimizer: expected the {len(known)} groups for which it was made, received "
                f"{len(groups)}; make the scheduler after add_param_group"
            )
        changes: list[dict[str, Any]] = [{} for _ in groups]
        for option, several in self._schedules.items():
            for g, (schedule, value) in enumerate(zip(several, self._first[option], strict=True)):
                is_absolute = isinstance(schedule, Schedule) and schedule.is_absolute
                value = schedule(step) * (1 if is_absolute else value)
                if not math.isfinite(value):
                    raise ValueError(
                        f"Scheduler: {option}: expected a finite value of step {step}, received {value}"
                    )
                changes[g] |= _changed(self.optimizer.param_groups[g] | changes[g], option, value)
        check = getattr(self.optimizer, "_check_options", None)
        for group, change in zip(self.optimizer.param_groups, changes, strict=True):
            if check is not None:
                check(group | change)
        for group, change in zip(self.optimizer.param_groups, changes, strict=True):
            for name, value in change.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the first values of the options."""
        return {"step": self.last_epoch, **{f"first.{option}": list(v) for option, v in self._first.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` has returned, in Python or in C++.

        The options themselves are part of the optimizer's state; the next ``step`` sets them.

        Raises:
            ValueError: the state is that of other options or groups. Nothing has changed then.
        """
        expected = {"step", *(f"first.{option}" for option in self._first)}
        sizes = {option: state_dict.get(f"first.{option}") for option in self._first}
        groups = len(self.optimizer.param_groups)
        fits = all(isinstance(value, (list, tuple)) and len(value) == groups for value in sizes.values())
        if state_dict.keys() != expected or not fits:
            raise ValueError(
                f"Scheduler: load_state_dict: expected {sorted(expected)} of {groups} groups, received another state"
            )
        self._first = {option: [float(v) for v in state_dict[f"first.{option}"]] for option in self._first}
        self.last_epoch = int(state_dict["step"])
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


def _element(group: dict[str, Any], option: str) -> int | None:
    """Return the index of the element of betas that an option such as beta2 names."""
    index = int(option[4:]) - 1 if option[:4] == "beta" and option[4:].isdigit() else -1
    betas = group.get("betas")
    return index if isinstance(betas, (tuple, list)) and 0 <= index < len(betas) else None


def _number(group: dict[str, Any], option: str) -> float:
    index = _element(group, option)
    value = group.get(option) if index is None else group["betas"][index]
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        numbers = [k for k, v in group.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
        numbers += [f"beta{i + 1}" for i in range(len(group.get("betas", ())))]
        raise ValueError(
            f"Scheduler: {option}: expected one of {', '.join(numbers)}, received another option"
        )
    return float(value)


def _changed(group: dict[str, Any], option: str, value: float) -> dict[str, Any]:
    index = _element(group, option)
    if index is None:
        return {option: value}
    betas = list(group["betas"])
    betas[index] = value
    return {"betas": type(group["betas"])(betas)}


class ReduceOnPlateau(ReduceLROnPlateau):
    """Reduce the learning rates when a metric has stopped improving.

    It is PyTorch's ``ReduceLROnPlateau``, with the same arguments. It refuses a metric that is NaN, and its state has
    the three numbers that the C++ class ``shoestring::optim::ReduceOnPlateau`` reads and writes.

    Example:
        >>> optimizer = shoestring.optim.AdamW(torch.nn.Linear(8, 2).parameters(), lr=1e-3)
        >>> plateau = shoestring.optim.schedules.ReduceOnPlateau(optimizer, patience=0)
        >>> for loss in (1.0, 0.9, 0.95):
        ...     plateau.step(loss)
        >>> optimizer.param_groups[0]["lr"]
        0.0001
    """

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Count a metric, and reduce the learning rates if it is time.

        Raises:
            ValueError: the metric is NaN. Nothing has changed then.
        """
        metric = float(metrics)
        if math.isnan(metric):
            raise ValueError("ReduceOnPlateau: metric: expected a number, received nan")
        super().step(metric, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric and the two counters."""
        return {
            "best": float(self.best),
            "num_bad_epochs": self.num_bad_epochs,
            "cooldown_counter": self.cooldown_counter,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` has returned, in Python or in C++.

        Raises:
            ValueError: an entry is missing. Nothing has changed then.
        """
        names = ("best", "num_bad_epochs", "cooldown_counter")
        if any(name not in state_dict for name in names):
            raise ValueError(
                f"ReduceOnPlateau: load_state_dict: expected {', '.join(names)}, received another state"
            )
        self.best = float(state_dict["best"])
        self.num_bad_epochs, self.cooldown_counter = (int(state_dict[name]) for name in names[1:])

"""Protection of a training run against bad steps: NaN, infinity and spikes of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from shoestring.core.one_thread import one_thread
from shoestring.optim.gradients import has_sums
from shoestring.optim.host_copy import HostCopy
from shoestring.optim.sam import SAM
from shoestring.optim.scaled import scaled_step
from shoestring.optim.several import several
from shoestring.optim.sharded import local
from shoestring.optim.state_tensors import state_tensors

__all__ = ["BadStep", "Guard"]


class BadStep(NamedTuple):
    """A step that was not taken.

    Attributes:
        step: the number of the step, counted from 0.
        reason: ``"loss"`` or ``"gradient"`` if it was not finite, or ``"spike"``.
        loss: the loss; NaN if ``step()`` was called without one.

    Example:
        >>> shoestring.optim.BadStep(step=7, reason="spike", loss=12.5).reason
        'spike'
    """

    step: int
    reason: str
    loss: float


class Guard:
    """Skip steps whose loss or gradients are NaN or infinite, or whose loss is a spike.

    Call ``guard.step(loss)`` in place of ``optimizer.step()``::

        guard = Guard(optimizer, on="rollback", spike=6.0, model=model)
        for batch in data:
            loss = model(batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
        guard.check()

    The device decides whether a step is taken, and the host learns it in the next call of ``step()``, so that it
    does not wait for the device. This is so for optimizers that can skip a step on the device: those of
    ``shoestring.optim``, except GaLore and APOLLO, and those of ``torch.optim`` with ``fused=True``. Before a
    step of any other optimizer, the host waits for the decision. With ``on="rollback"``, the host also waits when
    it takes a copy, once in ``every`` steps.

    Under ``torch.amp.GradScaler``, hand the guard to the scaler::

        guard.watch(loss)
        scaler.scale(loss).backward()
        scaler.step(guard)
        scaler.update()

    Gradients that are not finite are left to the scaler then, and are not bad: the scale was too large.

    With several micro-batches in a step, call ``watch()`` with the loss of each, and ``step()`` at the end. The step
    is judged by their mean. With several processes, it is judged by the mean of all their losses and by the
    gradients of all, so that all skip a step or none does. That takes one all-reduce of three numbers.

    Args:
        optimizers: the optimizer that takes the steps, of any class, or several, such as Muon and AdamW for different
            parameters. Of several, all take a step or none does. They must not step in backward.
        on: what follows a bad step, which is never taken itself. ``"skip"``: training goes on. ``"stop"``: the
            next call of ``step()`` or ``check()`` raises RuntimeError. ``"rollback"``: the next call of ``step()``
            or ``check()`` restores weights, buffers of ``model``, and optimizer state from the last copy. That
            call takes no step, because the gradients belong to the weights that are gone. Schedules, data and
            random numbers go on.
        spike: a loss is a spike if it is above ``mean + spike * deviation`` of the losses before it. Without it,
            only NaN and infinity are bad. A deviation below 1 % of the mean counts as 1 %.
        window: the number of good losses over which mean and deviation are taken, with weights that fall
            exponentially once so many losses are known. No loss before is a spike.
        every: the number of steps from one copy to the next. A copy is taken before a step whose loss and
            gradients are good. It holds weights and state in host memory, pinned for a GPU: 6.03 bytes per
            parameter for fp32 weights with 8-bit AdamW.
        limit: with ``"skip"``, ``step()`` raises RuntimeError after this number of bad steps in a row (10 by
            default). With ``"rollback"``, it raises instead of restoring the same copy more often (3 by default).
        model: a module whose buffers are restored as well, such as the statistics of BatchNorm, also those to
            which forward assigns new tensors.
        group: the processes that judge together; by default all processes, if ``torch.distributed`` has been
            initialised.

    Raises:
        ValueError: an argument is out of range, or has no effect with ``on``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> guard = shoestring.optim.Guard(torch.optim.SGD([weight], lr=0.5))
        >>> for x in [1.0, float("nan"), 1.0]:
        ...     weight.grad = None
        ...     loss = (weight * x).sum()
        ...     loss.backward()
        ...     guard.step(loss)
        >>> guard.check()
        >>> weight.tolist()
        [0.0, 0.0, 0.0, 0.0]
        >>> guard.bad_steps
        [BadStep(step=1, reason='loss', loss=nan)]
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        on: Literal["skip", "stop", "rollback"] = "skip",
        *,
        spike: float | None = None,
        window: int = 100,
        every: int = 100,
        limit: int | None = None,
        model: nn.Module | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if model is not None and on != "rollback":
            raise ValueError(
                f'Guard: model: expected None with on="{on}", which restores nothing, received one'
            )
        self.optimizers = several(optimizers)
        if not self.optimizers:
            raise ValueError("Guard: optimizers: expected at least one, received none")
        if on == "rollback" and any(isinstance(optimizer, SAM) for optimizer in self.optimizers):
            raise ValueError(
                'Guard: on: expected "skip" or "stop" with SAM, whose weights are moved when it steps, received rollback'
            )
        self._model = model
        if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD
        self._core: Any = torch.classes.shoestring.Guard(
            on, spike, window, every, limit, "" if group is None else group.group_name
        )
        self._copy: HostCopy | None = None

    # torch.amp.GradScaler takes the guard for an optimizer, and sets grad_scale and found_inf on it.
    _step_supports_amp_scaling = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def watch(self, loss: Tensor) -> None:
        """Add a loss to those of the coming step.

        Args:
            loss: a floating-point tensor with one element, on any device.

        Raises:
            ValueError: it is another tensor.
        """
        self._core.watch(loss)

    @torch.no_grad()
    @one_thread
    def step(self, loss: Tensor | None = None) -> None:
        """Take a step of the optimizers unless a loss or a gradient is bad, after acting on the step before.

        Args:
            loss: the loss of the step, or of its last micro-batch. It may be None after ``watch()``, or without
                ``spike``.

        Raises:
            ValueError: ``loss`` is not one number, an optimizer steps in backward, or one of several holds gradients of
                ``accumulate()``, which it would judge alone.
            RuntimeError: the step before was bad and ``on`` is ``"stop"``, or there have been ``limit`` bad steps.
                No optimizer has stepped.
        """
        self._check()
        if loss is not None:
            self.watch(loss)
        if self._review():
            self._core.drop()
            return
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_scaled = isinstance(found_inf, Tensor)
        bad: Tensor = self._core.judge([] if is_scaled else self._gradients())
        if self._core.is_copy_due() and not bad.item():
            tensors = [p for group in self.param_groups for p in group["params"]]
            self._copy = HostCopy(tensors, self.optimizers, [] if self._model is None else [self._model])
            self._core.copied()
        if is_scaled:
            assert found_inf is not None
            self._step(getattr(self, "grad_scale", None), found_inf + bad.to(found_inf.device))
            self._core.record(bad)
        else:
            self._core.record(self._step(None, bad))

    def check(self) -> None:
        """Act on the last step, if it was bad, as the next call of ``step()`` would. This waits for the device.

        Call it at the end of training, and before a checkpoint is written.

        Raises:
            RuntimeError: as ``step()`` does.
        """
        self._review()

    @property
    def steps(self) -> int:
        """The number of steps so far, with those that were not taken."""
        return int(self._core.steps())

    @property
    def rollbacks(self) -> int:
        """How often a copy has been restored."""
        return int(self._core.rollbacks())

    @property
    def bad_steps(self) -> list[BadStep]:
        """The bad steps up to the one before the last call of ``step()``, or the last after ``check()``."""
        return [BadStep(*bad) for bad in self._core.bad_steps()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the layout of ``state()`` in C++. This waits for the device.

        Returns:
            The numbers ``"steps"``, ``"rollbacks"`` and ``"in_a_row"``, the tensor ``"statistics"`` of the good
            losses, and the bad steps in ``"bad_steps"``, ``"bad_reasons"`` and ``"bad_losses"``. The copy is not
            part of the state: the next step takes a new one.
        """
        return {
            name: value.item() if value.dim() == 0 else value
            for name, value in dict(self._core.state()).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict()``, or of ``state()`` in C++.

        Args:
            state_dict: the state. Its numbers may be integers or tensors of one element.

        Raises:
            ValueError: the state does not fit. Nothing has changed then.
        """
        self._core.load_state(state_tensors(state_dict))
        self._copy = None

    def _gradients(self) -> list[Tensor]:
        gradients = [
            local(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        return [g._values() if g.is_sparse else g for g in gradients]

    def _check(self) -> None:
        """Raise ValueError if the guard cannot judge the gradients of all optimizers."""
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_in_backward", False):
                raise ValueError(
                    "Guard: optimizers: expected step_in_backward=False, received True: the optimizer steps before the "
                    "guard can judge"
                )
            if len(self.optimizers) > 1 and has_sums(optimizer):
                raise ValueError(
                    "Guard: optimizers: expected gradients in .grad, because several optimizers are judged together, "
                    "received some of accumulate()"
                )

    def _step(self, scale: Tensor | None, skip: Tensor) -> Tensor:
        """Step unless ``skip`` is above 0. Return 1 if the steps were skipped and 0 otherwise, on the device."""
        skipped = skip
        for optimizer in self.optimizers:
            if scale is None and has_sums(optimizer):
                scale = torch.ones_like(skip)  # the optimizer looks at the sums of accumulate(), too
            scaled_step("Guard", optimizer, scale, skip)
            flag: Tensor | None = getattr(optimizer, "_skipped", None)
            skipped = skipped if flag is None else flag
        return skipped

    def _review(self) -> bool:
        """Act on the step before. Return whether a copy has been restored."""
        if not self._core.review() or self._copy is None:
            return False
        self._copy.restore()
        return True

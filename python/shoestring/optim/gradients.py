"""Gradient hooks of the optimizers: sums over micro-batches, and steps within backward.

The C++ class ``OptimizerCore`` does the work. Here, hooks pass gradients on, and signals wait for the end of
a backward that steps parameters.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.core.dtensors import is_dtensor
from shoestring.optim.interrupts import Uninterrupted, deliver_later
from shoestring.optim.sharded import gradient_in_hook, reduced_after_hooks


class Backward:
    """A callback of autograd that marks the end of a backward in which hooks have run.

    If the backward fails, autograd destroys the callback without a call. Signals are deferred until then,
    since a parameter that was stepped in backward cannot be restored.
    """

    def __init__(self, optimizer: "GradientHooks", task: int) -> None:
        self._optimizer, self._task = weakref.ref(optimizer), task
        self._signals = Uninterrupted()
        self._signals.start()

    def __call__(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._backwards.discard(self._task)

    # Python drops exceptions that a destructor raises. Signals are therefore deferred until the destructor
    # ends, and delivered after it.
    def __del__(self) -> None:
        self()
        self._signals.stop(deliver_later)


class GradientHooks(Optimizer):
    """Mixin of the optimizers. Its hooks give the core each gradient as soon as it is complete."""

    # This mixin uses the following attributes and methods of the optimizer.
    step_in_backward: bool
    _core: Any
    _all_ranks: Any  # the processes that have split the steps
    _group: Any  # the process group of split steps
    _consolidated: Any
    _accumulating: bool
    _stepped: Callable[[Tensor], Tensor]
    _synchronize: Callable[[], None]
    _show_state: Callable[[], None]
    _take_changed_state: Callable[[], None]

    def _init_hooks(self) -> None:
        self._accumulating = False
        self._all_ranks = self._consolidated = None
        self._splits_gradients = self._is_retired = False  # whether processes split the gradients
        self._takes_norms = False  # whether a GradientNoise needs the last micro-batch alone in .grad
        # The addresses and versions of gradients that lack the sum of earlier micro-batches, by parameter.
        self._last: dict[Tensor, tuple[int, int]] = {}
        self._hooks: list[Any] = []
        self._watched: set[Tensor] = set()
        # Whether DistributedDataParallel replicates the parameters. None until the first gradient hook has
        # run.
        self._is_replicated: bool | None = None
        self._backwards: set[int] = set()  # autograd's graph task ids of the running backwards

    def _all_params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    @_disable_dynamo
    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context manager, add gradients to sums over micro-batches.

        Use it around forward and backward of every micro-batch of a step except the last. Each gradient is
        added to a sum in ``accumulate_dtype``, which takes 4 or 2 bytes per parameter. ``.grad`` is freed as
        soon as it has been added to the sum. With fp32 sums the only error is fp32 rounding, whatever the
        gradients' dtype. Run the last micro-batch of a step outside the context: ``step()``, or the step
        within backward, adds its gradient to the sum. Divide the loss by the number of micro-batches as
        usual. ``zero_grad()`` does not drop the sums, unless a micro-batch raised an error. A step drops the
        sums, also if a GradScaler skips the step.

        After the last micro-batch, fp32 gradients in ``.grad`` include the sums, so that a GradScaler and
        ``clip_grad_norm_`` see the whole gradient. 16-bit gradients would lose the precision of the sums, and
        :class:`GradientNoise` needs the last micro-batch alone. There, the step adds the sums: clip with
        ``max_grad_norm``, since a step refuses gradients that were changed in place. A GradScaler skips steps
        with an overflow in any micro-batch, but lowers the scale only for one in the last micro-batch.

        Raises:
            RuntimeError: the last step or backward failed half-way; the message says how to go on.
        """
        self._synchronize()
        self._take_changed_state()
        self._last.clear()
        self._core.begin_sums()
        self._watch(self._all_params(), always=True)
        before = self._core.set_accumulating(True)
        self._accumulating = True
        try:
            yield
        finally:
            try:
                self._core.flush()
            finally:
                self._accumulating = before
                self._core.set_accumulating(before)

    def _watch(self, params: Iterable[Tensor], always: bool = False) -> None:
        """Register gradient hooks on parameters.

        Without ``always``, do so only if parameters are stepped in backward, or gradients leave it.
        """
        if not (always or self.step_in_backward or self._splits_gradients):
            return
        optimizer = weakref.ref(self)

        def on_gradient(param: Tensor) -> None:
            self = optimizer()
            if self is not None and param.grad is not None:
                with torch.no_grad():
                    self._on_gradient(param)

        for p in params:
            if p.requires_grad and p not in self._watched:
                self._watched.add(p)
                self._hooks.append(p.register_post_accumulate_grad_hook(on_gradient))

    def _retire(self) -> None:
        """Take no more gradients and no more steps, since the optimizer has only a part of the state."""
        self._is_retired = True
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, param: Tensor) -> None:
        if self._is_replicated is None and not is_dtensor(param):
            self._is_replicated = reduced_after_hooks(self._watched)
        if self._is_replicated and self.step_in_backward:
            raise RuntimeError(
                f"{type(self).__name__}: step_in_backward: expected gradients that are complete in backward, received those "
                "of DistributedDataParallel, which all-reduces them later; use fully_shard, or step_in_backward=False"
            )
        if self._accumulating or self.step_in_backward:
            self._begin_backward()
            stepped = self._stepped(param)
            try:
                if stepped is not param:
                    stepped.grad = gradient_in_hook(param)
                self._core.on_gradient(stepped)
                if stepped is not param:
                    param.grad = None
            finally:
                if stepped is not param:
                    stepped.grad = None
                self._show_state()
        elif self._all_ranks is not None:
            self._core.on_gradient(param)
        elif self._is_replicated:
            # DistributedDataParallel all-reduces .grad after this hook, so .grad must include the sum.
            self._core.add_sum_to_gradient(param)
        elif self._core.has_sums():
            self._add_sum(param)

    def _add_sum(self, param: Tensor) -> None:
        """Let ``.grad`` include the sum of the earlier micro-batches, unless the sum would be rounded."""
        grad: Any = param.grad
        alike = not is_dtensor(param) or grad.placements == param.placements
        if grad.dtype == torch.float32 and grad.layout == torch.strided and alike and not self._takes_norms:
            stepped = self._stepped(param)
            try:
                if stepped is not param:
                    stepped.grad = gradient_in_hook(param)
                self._core.add_sum_to_gradient(stepped)
            finally:
                if stepped is not param:
                    stepped.grad = None
        self._last[param] = _mark(grad)

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if gradients that lack sums have been changed, as ``clip_grad_norm_`` does."""
        for param, mark in self._last.items():
            if param.grad is not None and _mark(param.grad) != mark:
                raise RuntimeError(
                    f"{type(self).__name__}: step: expected gradients as backward has left them, since they lack the sums of "
                    "accumulate(), received changed ones. To clip, use max_grad_norm; to change gradients otherwise, "
                    "add micro-batches in .grad"
                )

    @_disable_dynamo
    def _begin_backward(self) -> None:
        """Note that a backward is running. With activation checkpointing, one may run within another."""
        task = torch._C._current_graph_task_id()
        if task in self._backwards:
            return
        self._synchronize()
        self._take_changed_state()
        if task >= 0:
            self._backwards.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(Backward(self, task))


def _mark(grad: Tensor) -> tuple[int, int]:
    """Return numbers that differ once the gradient has been replaced or changed in place."""
    return 0 if is_dtensor(grad) else grad.data_ptr(), grad._version


def has_sums(optimizer: Any) -> bool:
    """Return whether an optimizer holds gradients of ``accumulate()``."""
    core = getattr(getattr(optimizer, "base_optimizer", optimizer), "_core", None)
    return core is not None and bool(core.has_sums())

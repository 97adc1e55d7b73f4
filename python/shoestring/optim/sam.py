"""Sharpness-aware minimisation (SAM) around any optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.core.one_thread import one_thread
from shoestring.optim.interrupts import Uninterrupted
from shoestring.optim.parameter_names import by_names
from shoestring.optim.scaled import scaled_step


class SAM(Optimizer):
    """Sharpness-aware minimisation (arXiv 2010.01412) around another optimizer.

    The first half of a step moves the weights w uphill, to ``w + rho * g / norm(g)``, where g is the gradient
    of all parameters. A second backward computes the gradient at the moved weights. The second half of the
    step restores w bit for bit and takes the base optimizer's step with the second gradient::

        optimizer = SAM(model.parameters(), AdamW, rho=0.05, lr=1e-3)
        for batch in data:
            loss(model, batch).backward()
            optimizer.first_step(zero_grad=True)
            loss(model, batch).backward()
            optimizer.second_step(zero_grad=True)

    In place of one ``backward`` there may be several, over micro-batches. ``optimizer.step(closure)`` does
    both halves and calls the closure twice. Under ``torch.amp.GradScaler``, do not call ``unscale_`` before
    the first half::

            scaler.scale(loss(model, batch)).backward()
            optimizer.first_step(zero_grad=True)  # only the direction counts: the scale does not matter
            scaler.scale(loss(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()

    A step of SAM takes twice the time of the base optimizer's. With ``interval``, only every ``interval``-th step,
    the first one included, moves the weights, and all others are steps of the base optimizer. ``first_step``
    tells whether the step needs the second backward::

            loss(model, batch).backward()
            if optimizer.first_step(zero_grad=True):
                loss(model, batch).backward()
            optimizer.second_step(zero_grad=True)

    The number of steps is part of the state dict. It includes steps that GradScaler has skipped.

    If the first gradient is not finite, the weights do not move, and ``scaler.step`` skips the step.
    ``scaler.step`` also skips the step if the second gradient is not finite. GradScaler lowers the scale
    because of the second gradient only. After a first gradient that is not finite, the second is computed at
    the same weights and will not be finite either.

    Memory: the state of the base optimizer and, between the two halves, a copy of the weights that have a
    gradient.

    Args:
        params: parameters, named parameters or parameter groups.
        base_optimizer: the class of the optimizer that takes the steps, from shoestring.optim, torch.optim or
            elsewhere.
        rho: the distance by which the first half moves the weights, at least 0. A group may override rho.
            norm(g) is always taken over all groups.
        adaptive: use ASAM (arXiv 2102.11600), which moves the weights by ``rho / norm(w * g) * w^2 * g``.
            ASAM needs a rho about ten times larger. A group may override ``adaptive``.
        interval: number of steps per step that moves the weights, at least 1. It is the same for all groups.
        options: options of the base optimizer: lr, weight_decay, max_grad_norm, ... Gradient clipping applies
            to the second half only.

    Attributes:
        base_optimizer: the optimizer that takes the steps. It shares its parameter groups and its state with
            the SAM object.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a half of a step is called out of order, or a state dict is requested between the
            halves.

    Layers with running statistics, such as BatchNorm, see every batch twice, the second time with the moved
    weights. To leave the second pass out of the statistics, set the ``momentum`` of these layers to 0 during
    it. Layers with random numbers, such as dropout, draw new numbers in the second pass. Sum gradients of
    micro-batches in ``.grad``, not with the base optimizer's ``accumulate()``. The move uphill is computed in
    fp32 and rounded once. In 16-bit weights, a move below half a unit in the last place is lost.

    Example:
        >>> model, x = torch.nn.Linear(8, 2), torch.randn(4, 8)
        >>> optimizer = shoestring.optim.SAM(model.parameters(), shoestring.optim.AdamW, rho=0.05, lr=1e-3)
        >>> for half in (optimizer.first_step, optimizer.second_step):
        ...     model(x).square().mean().backward()
        ...     _ = half(zero_grad=True)
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.uint8
    """

    # With this attribute, GradScaler calls step even if gradients are not finite. SAM's step must restore the
    # weights then.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        interval: int = 1,
        **options: Any,
    ) -> None:
        if not (isinstance(base_optimizer, type) and issubclass(base_optimizer, Optimizer)):
            expected = "a class of optimizers, such as shoestring.optim.AdamW"
            raise ValueError(f"SAM: base_optimizer: expected {expected}, received {base_optimizer!r}")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"SAM: interval: expected a whole number of at least 1, received {interval!r}")
        self.base_optimizer: Optimizer | None = None
        # Between the two halves of a step, the C++ object that restores the weights; else None.
        self._weights: Any = None
        self._finite: Tensor | None = None  # whether the gradient norm of the first half was finite
        super().__init__(params, dict(rho=rho, adaptive=adaptive, interval=interval, sam_steps=0))
        if options.get("step_in_backward"):
            raise ValueError(
                "SAM: step_in_backward: expected False, with two backward passes a step, received True"
            )
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.defaults = {**self.base_optimizer.defaults, **self.defaults}
        self._share()

    def _share(self) -> None:
        assert self.base_optimizer is not None
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``."""
        group = {**self.defaults, **param_group}
        if not group["rho"] >= 0:
            raise ValueError(f"SAM: rho: expected a number of at least 0, received {group['rho']!r}")
        # The constructor is still running. It passes all groups to the base optimizer later.
        if self.base_optimizer is None:
            super().add_param_group(param_group)
        else:
            for name in ("rho", "adaptive"):
                param_group.setdefault(name, group[name])
            for name in ("interval", "sam_steps"):
                param_group[name] = self.param_groups[0][name]
            self.base_optimizer.add_param_group(param_group)

    @_disable_dynamo
    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> bool:
        """Move every parameter that has a gradient uphill by ``rho``.

        With ``zero_grad``, drop the gradients afterwards.

        Returns:
            Whether the weights have moved, and the step needs a second backward. If not, because of
            ``interval``, the gradients stay for ``second_step``.
        """
        if self._weights is not None:
            raise RuntimeError(
                "SAM: first_step: expected second_step() after the last first_step(), received another. Call "
                "zero_grad() and second_step() to restore the weights without a step."
            )
        if not self._moves():
            return False
        with Uninterrupted():
            try:
                self._ascend()
            except BaseException:
                self._go_back()
                raise
        if zero_grad:
            self.zero_grad()
        return True

    def _moves(self) -> bool:
        """Return whether this step moves the weights."""
        group = self.param_groups[0]
        moves: bool = group["sam_steps"] % group["interval"] == 0
        return moves

    def _ascend(self) -> None:
        """Move the weights uphill along their gradients, and note whether the gradients are finite."""
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        params, rho = [p for p, _ in moved], [float(group["rho"]) for _, group in moved]
        adaptive = [bool(group["adaptive"]) for _, group in moved]
        self._weights = torch.classes.shoestring.MovedWeights(params)
        self._weights.move(rho, adaptive)
        self._finite = self._weights.finite()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients with the base optimizer's ``zero_grad``."""
        assert self.base_optimizer is not None
        self.base_optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Restore the weights and take the base optimizer's step.

        With ``zero_grad``, drop the gradients afterwards.
        """
        self.step()  # call the public step(), since learning rate schedulers wrap it
        if zero_grad:
            self.zero_grad()

    @_disable_dynamo
    @torch.no_grad()
    @one_thread
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """With a closure, take both halves of a step.

        The closure clears the gradients, runs forward and backward, and returns the loss. It is called twice,
        or once in a step that does not move the weights, and the loss of the first call, at the original
        weights, is returned. Without a closure, ``step`` is ``second_step``.
        """
        if closure is None:
            # If the base optimizer's step failed in the second half, the second half may be repeated.
            is_unfinished = getattr(self.base_optimizer, "_is_unfinished", False)
            if self._weights is None and self._moves() and not is_unfinished:
                raise RuntimeError("SAM: step: expected first_step() before, or a closure, received neither")
            self._descend()
            return None
        if self._weights is not None:
            raise RuntimeError("SAM: step: expected second_step() after first_step(), received a closure")
        with torch.enable_grad():
            loss = closure()
        if self.first_step(zero_grad=True):
            try:
                with torch.enable_grad():
                    closure()
            except BaseException:
                self._go_back()
                raise
        self._descend()
        return loss

    def _go_back(self) -> None:
        """Restore the weights from before the move uphill."""
        if self._weights is not None:
            self._weights.go_back()
        self._weights = None

    def _descend(self) -> None:
        with Uninterrupted():
            self._step_at_old_weights()
            for group in self.param_groups:
                group["sam_steps"] += 1

    def _step_at_old_weights(self) -> None:
        """Restore the weights from before ``first_step`` and step the base optimizer.

        Under a GradScaler, the gradients are divided by its scale, and the step is skipped if they are not
        finite.
        """
        base = self.base_optimizer
        assert base is not None
        self._go_back()
        finite, self._finite = self._finite, None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            base.step()
            return
        if finite is not None:
            found_inf = found_inf + (~finite).to(found_inf)
        scaled_step("SAM", base, getattr(self, "grad_scale", None), found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state dict, whose groups also hold SAM's options and steps.

        Raises:
            RuntimeError: called between the halves of a step.
        """
        self._expect_whole("state_dict")
        assert self.base_optimizer is not None
        sam_state = super().state_dict()  # call Optimizer.state_dict too, since it runs the user's hooks
        return {**self.base_optimizer.state_dict(), **sam_state}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the base optimizer, and share its groups and state again.

        The state of a parameter with a name is found by the name.
        """
        self._expect_whole("load_state_dict")
        assert self.base_optimizer is not None
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self.base_optimizer.load_state_dict(by_names(self, state_dict))
        self._share()
        for group in self.param_groups:  # a state dict of the base optimizer has none of SAM's options
            for name in ("rho", "adaptive", "interval", "sam_steps"):
                group.setdefault(name, self.defaults[name])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _expect_whole(self, what: str) -> None:
        if self._weights is not None:
            raise RuntimeError(
                f"SAM: {what}: expected second_step() after first_step(), received the weights that "
                "first_step() has moved"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._expect_whole("copy")
        between_halves = {"_weights": None, "_finite": None}
        return {"defaults": self.defaults, "base_optimizer": self.base_optimizer, **between_halves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

"""The public ``step`` of the optimizers, and the words of their errors."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from shoestring.core.one_thread import one_thread
from shoestring.core.stacks import OF_ONE_PROCESS
from shoestring.optim.interrupts import Uninterrupted


class Steps(Optimizer):
    """An optimizer whose class takes the step in ``_step``, which one thread at a time runs."""

    _step: Callable[[], None]

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Return the result of ``closure``, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_alone()
        return loss

    @one_thread
    def _step_alone(self) -> None:
        # C++ reads ``grad`` without Python's lock. Another thread that replaces a gradient would free it meanwhile.
        groups = self.param_groups if threading.active_count() > 1 else []
        gradients = [p.grad for group in groups for p in group["params"]]
        self._check_norm()
        with Uninterrupted():
            self._step()
        del gradients

    def _check_norm(self) -> None:
        """Raise ValueError if the step would clip to a norm that differs between processes."""
        norm = getattr(self, "max_grad_norm", None)
        if norm is not None and any(
            hasattr(p, OF_ONE_PROCESS) for g in self.param_groups for p in g["params"]
        ):
            raise ValueError(
                f"{self._name}: max_grad_norm: expected None with experts that processes have split, since each has another "
                f"norm and would clip the other weights differently, received {norm}. Call clip_grad_norm_ of the report of "
                "expert_parallel before the step"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _expect(self, good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise ValueError(f"{self._name}: {name}: expected {expected}, received {received!r}")

"""A copy in host memory of everything that a training run changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from shoestring.optim.host_copy import HostCopy
from shoestring.runs.training_file import Stateful, random_states, set_random_states


class RunCopy:
    """Copies weights, buffers, gradients, states of optimizers and parts, and random states, to restore them.

    ``restore()`` may be called several times.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], parts: Mapping[str, Stateful]
    ) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._copy = HostCopy(tensors, [*optimizers, *parts.values()])
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self._random = random_states()

    def restore(self) -> None:
        """Make the run what it was, bit for bit."""
        self._copy.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        set_random_states(*self._random)

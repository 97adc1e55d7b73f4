"""A copy in host memory of everything that a training run changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.optim.host_copy import map_tensors, on_host
from shoestring.optim.sharded import local
from shoestring.runs.training_file import Stateful, random_states, set_random_states


class RunCopy:
    """Copies weights, buffers, gradients, states of optimizers and parts, and random states, to restore them.

    ``restore()`` may be called several times.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], parts: Mapping[str, Stateful]
    ) -> None:
        self._parts = {name: (part, map_tensors(part.state_dict(), on_host)) for name, part in parts.items()}
        self._optimizers = [(each, map_tensors(each.state_dict(), on_host)) for each in optimizers]
        self._tensors = [(t, on_host(local(t.detach()))) for t in [*model.parameters(), *model.buffers()]]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self._random = random_states()

    @torch.no_grad()
    def restore(self) -> None:
        """Make the run what it was, bit for bit."""
        for optimizer, state in self._optimizers:
            optimizer.load_state_dict(map_tensors(state, Tensor.clone))
        for part, values in self._parts.values():
            part.load_state_dict(map_tensors(values, Tensor.clone))
        for tensor, host in self._tensors:
            local(tensor.detach()).copy_(host)
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        set_random_states(*self._random)


def every_optimizer(optimizers: Optimizer | Sequence[Optimizer]) -> list[Any]:
    """Return the optimizers as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

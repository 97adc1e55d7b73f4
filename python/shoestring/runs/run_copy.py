"""A copy in host memory of everything that a training run changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.optim.gradients import has_sums
from shoestring.optim.host_copy import HostCopy, call_all
from shoestring.runs.training_file import Stateful, random_states, set_random_states


class RunCopy:
    """Copies weights, buffers, gradients, states of optimizers and parts, and random states, to restore them.

    The weights are those of the model and of the optimizers. Modules get the mode back that they had, of training or
    evaluation. ``restore()`` may be called several times. ``what`` begins errors.

    Raises:
        ValueError: an optimizer holds gradients of ``accumulate()``, which a restored state would drop.
    """

    def __init__(
        self, what: str, model: nn.Module, optimizers: Sequence[Optimizer], parts: Mapping[str, Stateful]
    ) -> None:
        if any(map(has_sums, optimizers)):
            raise ValueError(
                f"{what}: optimizers: expected gradients in .grad, received sums of accumulate(), which would be lost. "
                "Call step() or zero_grad() before"
            )
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        weights = {id(p): p for params in [model.parameters(), *groups] for p in params}
        self._copy = HostCopy(weights.values(), [*optimizers, *parts.values()], [model])
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in weights.values()]
        self._random = random_states()
        self._modes = [(module, module.training) for module in model.modules()]

    def restore(self) -> None:
        """Make the run what it was, bit for bit.

        If a part refuses its state, everything else is restored before the error is raised.
        """
        gradients = (partial(_set_gradient, p, gradient) for p, gradient in self._gradients)
        modes = (partial(setattr, module, "training", mode) for module, mode in self._modes)
        call_all([self._copy.restore, *gradients, *modes, partial(set_random_states, *self._random)])


def _set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None if gradient is None else gradient.clone()

"""One optimizer or several, as an argument."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer


def several(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return one optimizer, or several, as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

"""Count the calls of shoestring's linear operators, and let ``patch(linear=True)`` choose them on every CPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.integrations.transformers import products


def choose_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``patch(linear=True)`` choose ours for every group, whatever this CPU would measure.

    PyTorch's library computes the forward, so that both libraries are used.
    """
    monkeypatch.setattr(products, "_faster_by_library", lambda *_: ("forward",))
    monkeypatch.setattr(products, "_ratio", lambda *_: 0.5)
    monkeypatch.setattr(products, "_measured", {})


class Calls(TorchDispatchMode):
    """Count the calls of each of shoestring's linear operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.group = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linear += func is torch.ops.shoestring.linear.default
        self.group += func is torch.ops.shoestring.linear_group.default
        return func(*args, **(kwargs or {}))

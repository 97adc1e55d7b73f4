"""Replace GELU and dropout modules of transformers models by fused operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.instances import Found, Left, derive
from shoestring.layers.gelu import gelu
from shoestring.layers.seeded_dropout import seeded_dropout


def fuse_gelus(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Replace the forward of activation modules that compute GELU by the operator ``gelu``.

    A module is a candidate if the name of its class contains "GELU" and it has no parameters. A test on
    numbers determines whether it computes the exact GELU or the tanh approximation.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if "gelu" not in type(module).__name__.lower() or module._modules or module._parameters:
            continue
        approximate = None if "forward" in module.__dict__ else approximation(module)
        if approximate is None:
            left.append((name, "a forward of its own, or an activation that is no GELU"))
            continue
        body = {"forward": _gelu(type(module).forward, approximate)}
        changes.append((name, f"fused GELU, approximate {approximate!r}", derive(module, body)))
    return changes, left


def approximation(module: Any) -> str | None:
    """Return the option ``approximate`` with which ``gelu`` computes what a module computes, or None."""
    x = torch.linspace(-6, 6, 97)
    try:
        with torch.no_grad():
            y = module(x)
        for approximate in ("none", "tanh"):
            if torch.allclose(y, F.gelu(x, approximate=approximate), rtol=1e-5, atol=1e-6):
                return approximate
    except Exception:  # raised if the module's forward has another signature or returns no tensor
        return None
    return None


def _gelu(original: Callable[..., Any], approximate: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        return gelu(x, approximate)

    return forward


def fuse_dropouts(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Replace the forward of ``nn.Dropout`` modules by ``seeded_dropout``, which stores no mask.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Dropout) or not 0 < module.p < 1:
            continue
        if "forward" in module.__dict__ or type(module).forward is not nn.Dropout.forward or module.inplace:
            left.append((name, "a dropout in place, or with a forward of its own"))
            continue
        changes.append((name, "dropout without a mask", derive(module, {"forward": _dropout})))
    return changes, left


@functools.wraps(nn.Dropout.forward)
def _dropout(self: Any, x: Tensor) -> Tensor:
    p = self.p
    if not self.training or not 0 < p < 1:
        result: Tensor = F.dropout(x, p, self.training)
        return result
    return seeded_dropout(x, p)

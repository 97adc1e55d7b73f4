"""Make dropout modules of transformers models store no mask."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.instances import Found, Left, derive
from shoestring.layers.seeded_dropout import seeded_dropout


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

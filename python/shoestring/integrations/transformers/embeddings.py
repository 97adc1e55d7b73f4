"""Replace the embeddings of transformers models by an operator with a faster gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive
from shoestring.layers.embedding import embedding

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def fuse_embeddings(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Use ``embedding`` in ``nn.Embedding`` modules.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding):
            continue
        if "forward" in module.__dict__ or type(module).forward is not nn.Embedding.forward:
            left.append((name, "an embedding with a forward of its own"))
        elif module.max_norm is not None:
            left.append((name, "an embedding with max_norm, which changes its weight in forward"))
        elif module.sparse:
            left.append((name, "an embedding with sparse gradients"))
        else:
            changes.append(
                (name, "embedding with a gradient in one pass", derive(module, {"forward": _forward}))
            )
    return changes, left


@functools.wraps(nn.Embedding.forward)
def _forward(self: Any, input: Tensor) -> Tensor:
    weight = self.weight
    # Without a gradient, PyTorch's operator does the same. A sharded weight is a tensor of another class.
    plain = type(weight) in (nn.Parameter, Tensor) and weight.dtype in _DTYPES and weight.device.type == "cpu"
    if not (plain and weight.requires_grad and torch.is_grad_enabled()) or self.max_norm or self.sparse:
        result: Tensor = nn.Embedding.forward(self, input)
        return result
    return embedding(input, weight, padding_idx=self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)

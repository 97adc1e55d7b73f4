"""Dense layers, computed by this package or by PyTorch, whichever is faster on this CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks


def is_plain(layer: nn.Module) -> bool:
    """Return whether a call of the layer does nothing but ``F.linear`` with its weight and bias."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or global_hooks._global_forward_hooks
            or global_hooks._global_forward_pre_hooks
            or global_hooks._global_backward_hooks
            or global_hooks._global_backward_pre_hooks
        )
    )


def dense_linear_group(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the outputs of plain layers that read the same x, by the rule of the C++ function of this name."""
    outputs: list[Tensor] = torch.ops.shoestring._dense_linear_group(
        x, [layer.weight for layer in layers], [layer.bias for layer in layers]
    )
    return outputs

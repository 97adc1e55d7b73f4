"""The gated activation of Gemma's MLP."""

import torch
from torch import Tensor
from torch.nn import functional as F


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up`` in one pass, computed in fp32 (fp64 for fp64) and rounded once (arXiv 2002.05202).

    Far below zero, where gelu is written as ``x * (1 + erf(x / sqrt(2))) / 2`` and its sum cancels, this one does not lose
    its digits. Backward keeps gate and up alone, and makes both gradients in one pass.

    Args:
        gate, up: one shape, dtype and device; fp32, fp64, bf16 or fp16.
        approximate: "tanh" (Gemma, GPT-2) or "none", as in ``torch.nn.functional.gelu``.

    Returns:
        Their shape and dtype. Differentiable once.

    Raises:
        RuntimeError: shapes, dtypes or devices that differ, or an unknown approximation.
    """
    result: Tensor = torch.ops.shoestring.geglu(gate, up, approximate)
    return result


def geglu_reference(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """The same in plain PyTorch."""
    return F.gelu(gate, approximate=approximate) * up

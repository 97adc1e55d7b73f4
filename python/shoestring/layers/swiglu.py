"""The gated activation of Llama's MLP."""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in one pass, computed in fp32 (fp64 for fp64) and rounded once (arXiv 2002.05202).

    Backward keeps gate and up alone, and makes both gradients in one pass. Where the product goes into a linear layer
    with an adapter, ``lora_linear(up, ..., gate=gate)`` does not keep it either.

    Args:
        gate, up: one shape, dtype and device; fp32, fp64, bf16 or fp16.

    Returns:
        Their shape and dtype. Differentiable once.

    Raises:
        RuntimeError: shapes, dtypes or devices that differ.
    """
    result: Tensor = torch.ops.shoestring.swiglu(gate, up)
    return result


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return F.silu(gate) * up

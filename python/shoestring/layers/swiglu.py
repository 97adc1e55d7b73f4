"""SwiGLU, the gated activation of Llama's MLP."""

import torch
from torch import Tensor

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` in one pass, in fp32 (fp64 for fp64), rounded once (arXiv 2002.05202).

    Only gate and up are saved for backward, which computes both gradients in one pass. If the result is the
    input of a linear layer with an adapter, use ``lora_linear(up, ..., gate=gate)`` instead, which does not
    save that input.

    Args:
        gate, up: any shape, the same for both, with the same dtype and device; fp32, fp64, bf16 or fp16.

    Returns:
        The shape and dtype of gate. Differentiable once.

    Raises:
        RuntimeError: gate and up differ in shape, dtype or device.

    Example:
        >>> gate, up = torch.randn(2, 16, 64)
        >>> expected = torch.nn.functional.silu(gate) * up
        >>> torch.allclose(shoestring.swiglu(gate, up), expected, atol=1e-5)
        True
    """
    result: Tensor = torch.ops.shoestring.swiglu(gate, up)
    return result

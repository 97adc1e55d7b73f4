"""GeGLU, the gated activation of Gemma's MLP."""

import torch
from torch import Tensor

__all__ = ["geglu"]


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu(gate) * up`` in one pass, in fp32 (fp64 for fp64), rounded once (arXiv 2002.05202).

    For very negative x, the usual formula of GELU, ``x * (1 + erf(x / sqrt(2))) / 2``, loses its digits to
    cancellation. This implementation does not. Only gate and up are saved for backward, which computes both
    gradients in one pass.

    Args:
        gate, up: any shape, the same for both, with the same dtype and device; fp32, fp64, bf16 or fp16.
        approximate: "none" (the exact GELU) or "tanh" (Gemma, GPT-2), as in ``torch.nn.functional.gelu``.

    Returns:
        The shape and dtype of gate. Differentiable once.

    Raises:
        RuntimeError: gate and up differ in shape, dtype or device, or approximate is unknown.

    Example:
        >>> gate, up = torch.randn(2, 16, 64)
        >>> expected = torch.nn.functional.gelu(gate) * up
        >>> torch.allclose(shoestring.geglu(gate, up), expected, atol=1e-5)
        True
    """
    result: Tensor = torch.ops.shoestring.geglu(gate, up, approximate)
    return result

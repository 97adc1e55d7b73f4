"""GELU, the activation of most encoders."""

import torch
from torch import Tensor

__all__ = ["gelu"]


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GELU (arXiv 1606.08415) in one pass, in fp32 (fp64 for fp64), rounded once.

    For very negative x, the usual formula, ``x * (1 + erf(x / sqrt(2))) / 2``, loses its digits to
    cancellation. This implementation does not. Only x is saved for backward.

    Args:
        x: any shape, fp32, fp64, bf16 or fp16.
        approximate: "none" (the exact GELU) or "tanh", as in ``torch.nn.functional.gelu``.

    Returns:
        The shape and dtype of x. Differentiable once.

    Raises:
        RuntimeError: the dtype of x is not supported, or approximate is unknown.

    Example:
        >>> x = torch.randn(16, 64)
        >>> torch.allclose(shoestring.gelu(x), torch.nn.functional.gelu(x), atol=1e-6)
        True
    """
    result: Tensor = torch.ops.shoestring.gelu(x, approximate)
    return result

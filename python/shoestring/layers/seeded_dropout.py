"""Dropout whose mask is computed from a seed. Backward computes the mask again instead of saving it."""

import torch
from torch import Tensor

__all__ = ["seeded_dropout"]


def draw_seed(like: Tensor) -> Tensor:
    """Draw a seed, one int64 on the device of `like`, from the default generator of that device.

    Activation checkpointing restores the generator's state, so a recomputation draws the same seed as the
    first forward.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=like.device)


def seeded_dropout(x: Tensor, p: float = 0.5, *, seed: Tensor | None = None) -> Tensor:
    """Apply dropout like ``F.dropout``, without a mask in memory.

    The mask is a function of the seed and the position of an element, and backward computes it again. The
    random numbers are Philox 4x32 with 7 rounds (Salmon et al., SC 2011).

    Args:
        x: any shape; fp32, fp64, bf16 or fp16.
        p: probability that an element becomes 0, rounded to a multiple of 2^-16. The other elements are
            divided by 1 - p.
        seed: one int64 on the device of x. None: draw a seed from the device's default generator.

    Returns:
        The shape and dtype of x. The same seed gives the same mask on every device. Differentiable.

    Raises:
        RuntimeError: p is outside [0, 1), or seed has another dtype or device.

    Example:
        >>> x, seed = torch.randn(16, 64), torch.tensor([7])
        >>> y = shoestring.seeded_dropout(x, 0.1, seed=seed)
        >>> torch.equal(y, shoestring.seeded_dropout(x, 0.1, seed=seed))
        True
    """
    result: Tensor = torch.ops.shoestring.seeded_dropout(x, draw_seed(x) if seed is None else seed, p)
    return result

"""Min-SNR weights of the loss of a diffusion model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def min_snr_weights(
    alphas_cumprod: Tensor,
    timesteps: Tensor,
    gamma: float = 5.0,
    prediction: Literal["epsilon", "x0", "v"] = "epsilon",
) -> Tensor:
    """Return the Min-SNR weights of the squared errors of a diffusion model.

    With ``a = alphas_cumprod[t]`` and ``SNR = a / (1 - a)``, the weight depends on the quantity that the model
    predicts, and whose mean squared error it multiplies:

    ============= =============================== ===========================
    prediction    weight                          computed as
    ============= =============================== ===========================
    ``"epsilon"`` ``min(SNR, gamma) / SNR``       ``min(1, gamma (1 - a) / a)``
    ``"x0"``      ``min(SNR, gamma)``             ``min(a / (1 - a), gamma)``
    ``"v"``       ``min(SNR, gamma) / (SNR + 1)`` ``min(a, gamma (1 - a))``
    ============= =============================== ===========================

    The three losses are the same loss of x0. The weights are computed in fp64. They are finite at SNR = 0, as in
    a schedule with zero terminal SNR, and at a = 1.

    Args:
        alphas_cumprod: the products of ``1 - beta`` up to each timestep, (T,); fp64, fp32, bf16 or fp16. fp64 is
            best, because ``1 - a`` cancels.
        timesteps: indices into ``alphas_cumprod``, any shape, int64 or int32, on the same device.
        gamma: limit of the signal-to-noise ratio, above 0.
        prediction: the quantity that the model predicts.

    Returns:
        The weights, fp32, in the shape of ``timesteps``.

    Raises:
        ValueError: an argument does not fit. On the CPU also if a value of ``alphas_cumprod`` is outside [0, 1].
        IndexError: a timestep is out of range, on the CPU.

    Example:
        >>> alphas_cumprod = torch.linspace(0.9999, 0.0, 1000, dtype=torch.float64)
        >>> timesteps = torch.tensor([0, 500, 999])
        >>> shoestring.diffusion.min_snr_weights(alphas_cumprod, timesteps, prediction="v")
        tensor([0.0005, 0.4994, 0.0000])
        >>> prediction, target = torch.randn(2, 3, 4, 8, 8)
        >>> weights = shoestring.diffusion.min_snr_weights(alphas_cumprod, timesteps)
        >>> loss = ((prediction - target).square().flatten(1).mean(1) * weights).mean()

    Reference: T. Hang et al., Efficient diffusion training via Min-SNR weighting strategy, arXiv 2303.09556.
    """
    weights: Tensor = torch.ops.shoestring._min_snr_weights(alphas_cumprod, timesteps, gamma, prediction)
    return weights

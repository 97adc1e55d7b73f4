"""Parts of the training of diffusion models."""

from shoestring.losses.min_snr import min_snr_weights

__all__ = ["min_snr_weights"]

"""Optimizers with low-memory state; drop-in for torch.optim."""

from shoestring.optim.adamw import AdamW

__all__ = ["AdamW"]

"""Optimizers with low-memory state; drop-in for torch.optim."""

from shoestring.optim.adamw import AdamW
from shoestring.optim.lion import Lion
from shoestring.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Lion"]

"""Optimizers with low-memory state; drop-in for torch.optim."""

from shoestring.optim.adamw import AdamW
from shoestring.optim.apollo import APOLLO, APOLLOMini
from shoestring.optim.files import load_optimizer, save_optimizer
from shoestring.optim.galore import GaLore
from shoestring.optim.lion import Lion
from shoestring.optim.sam import SAM
from shoestring.optim.sgd import SGD

__all__ = ["APOLLO", "SAM", "SGD", "APOLLOMini", "AdamW", "GaLore", "Lion", "load_optimizer", "save_optimizer"]

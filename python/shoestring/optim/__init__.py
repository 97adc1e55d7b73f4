"""Optimizers with low-memory state, as drop-in replacements for ``torch.optim``, and averages of weights."""

from shoestring.optim import schedules
from shoestring.optim.adafactor import Adafactor
from shoestring.optim.adamw import AdamW
from shoestring.optim.ademamix import AdEMAMix
from shoestring.optim.apollo import APOLLO, APOLLOMini
from shoestring.optim.average_checkpoints import average_checkpoints
from shoestring.optim.averages import Averages
from shoestring.optim.batch_norm import update_batch_norm
from shoestring.optim.came import CAME
from shoestring.optim.files import load_optimizer, save_optimizer
from shoestring.optim.galore import GaLore
from shoestring.optim.gradient_noise import GradientNoise, scale_lr
from shoestring.optim.guard import BadStep, Guard
from shoestring.optim.lamb import LAMB
from shoestring.optim.lion import Lion
from shoestring.optim.muon import Muon
from shoestring.optim.sam import SAM
from shoestring.optim.schedule_free_adamw import ScheduleFreeAdamW
from shoestring.optim.sgd import SGD
from shoestring.optim.unfreezing import Unfreezing

__all__ = [
    "APOLLO",
    "CAME",
    "LAMB",
    "SAM",
    "SGD",
    "APOLLOMini",
    "AdEMAMix",
    "Adafactor",
    "AdamW",
    "Averages",
    "BadStep",
    "GaLore",
    "GradientNoise",
    "Guard",
    "Lion",
    "Muon",
    "ScheduleFreeAdamW",
    "Unfreezing",
    "average_checkpoints",
    "load_optimizer",
    "save_optimizer",
    "scale_lr",
    "schedules",
    "update_batch_norm",
]

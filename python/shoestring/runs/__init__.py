"""Training runs: saving and resuming them as a whole, finding learning rates and batch sizes."""

from shoestring.runs.find_batch_size import (
    BatchSizeSearch,
    BatchTrial,
    MemoryAdvice,
    find_batch_size,
    memory_advice,
)
from shoestring.runs.find_lr import LrPass, LrRange, find_lr
from shoestring.runs.training_file import TrainingPosition, load_training, save_training

__all__ = [
    "BatchSizeSearch",
    "BatchTrial",
    "LrPass",
    "LrRange",
    "MemoryAdvice",
    "TrainingPosition",
    "find_batch_size",
    "find_lr",
    "load_training",
    "memory_advice",
    "save_training",
]

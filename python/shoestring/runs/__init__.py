"""Training runs: saving and resuming them as a whole, and switches that make their steps faster."""

from shoestring.runs.fast_defaults import FastDefaults, MeasuredSwitch, fast_defaults
from shoestring.runs.training_file import TrainingPosition, load_training, save_training

__all__ = [
    "FastDefaults",
    "MeasuredSwitch",
    "TrainingPosition",
    "fast_defaults",
    "load_training",
    "save_training",
]

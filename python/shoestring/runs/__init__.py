"""Training runs: saving and resuming them as a whole."""

from shoestring.runs.training_file import TrainingPosition, load_training, save_training

__all__ = ["TrainingPosition", "load_training", "save_training"]

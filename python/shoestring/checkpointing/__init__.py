"""Gradient checkpointing, and plans of what is kept, recomputed or moved away under a byte budget."""

from shoestring.checkpointing.function import checkpoint, checkpoint_sequential, tag_activation
from shoestring.checkpointing.model import CheckpointReport, checkpoint_model
from shoestring.checkpointing.offload import offload_activations
from shoestring.checkpointing.plan import (
    CheckpointPlan,
    PlanBlock,
    PlanChoice,
    checkpoint_plan,
    simulate_checkpoint_plan,
)
from shoestring.checkpointing.tiled import tiled, tiled_features

__all__ = [
    "CheckpointPlan",
    "CheckpointReport",
    "PlanBlock",
    "PlanChoice",
    "checkpoint",
    "checkpoint_model",
    "checkpoint_plan",
    "checkpoint_sequential",
    "offload_activations",
    "simulate_checkpoint_plan",
    "tag_activation",
    "tiled",
    "tiled_features",
]

"""Gradient checkpointing, and plans that keep, recompute or offload activations under a byte budget."""

from shoestring.checkpoint.function import checkpoint, checkpoint_sequential, tag_activation
from shoestring.checkpoint.model import CheckpointReport, checkpoint_model
from shoestring.checkpoint.offload import offload_activations
from shoestring.checkpoint.tiled import tiled, tiled_features
from shoestring.checkpoint.tiled_layers import TiledLayers, tile_layers
from shoestring.checkpoint.weights import OffloadedWeights, offload_weights

__all__ = [
    "CheckpointReport",
    "OffloadedWeights",
    "TiledLayers",
    "checkpoint",
    "checkpoint_model",
    "checkpoint_sequential",
    "offload_activations",
    "offload_weights",
    "tag_activation",
    "tile_layers",
    "tiled",
    "tiled_features",
]

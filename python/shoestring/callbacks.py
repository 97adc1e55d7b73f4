"""Callbacks of training loops, and adapters to the loops of other libraries."""

from shoestring.runs.callbacks import (
    Callback,
    Callbacks,
    OnStep,
    Run,
    TensorBoard,
    WandB,
    lightning_callback,
    transformers_callback,
)

__all__ = [
    "Callback",
    "Callbacks",
    "OnStep",
    "Run",
    "TensorBoard",
    "WandB",
    "lightning_callback",
    "transformers_callback",
]

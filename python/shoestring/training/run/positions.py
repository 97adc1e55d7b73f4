"""Check that rows are not longer than the positions for which a model was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from shoestring.core.errors import InputError
from shoestring.files.read_file import is_number

# names of the number of positions in configurations of transformers
NAMES = ("max_position_embeddings", "n_positions")


class Positions(NamedTuple):
    """The field of a model's configuration with its number of positions, and that number."""

    field: str
    number: float


def positions_of(config: dict[str, Any]) -> Positions | None:
    """Return the number of positions of a model.

    Scaled rotary positions count as the positions that their factor gives. None if the configuration has no such field.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    stretch: float = factor if factor is not None and is_number(factor) else 1.0
    for name in NAMES:
        if is_number(config.get(name)):
            return Positions(name, config[name] * max(stretch, 1))
    return None


def check_positions(folder: Path, config: dict[str, Any], seq_len: int) -> None:
    """Raise InputError if rows of ``--seq-len`` tokens are longer than the model's positions."""
    positions = positions_of(config)
    if positions is not None and seq_len > positions.number:
        raise InputError(
            f"--seq-len {seq_len}: expected at most {positions.number:g}, the positions of {folder}; give fewer, or raise "
            f"{positions.field} in its config.json to train rotary positions beyond them"
        )

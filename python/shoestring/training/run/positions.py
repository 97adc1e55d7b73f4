"""Check that rows are not longer than the positions for which a model was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoestring.core.errors import InputError
from shoestring.files.read_file import is_number

# names of the number of positions in configurations of transformers
NAMES = ("max_position_embeddings", "n_positions")


def positions_of(config: dict[str, Any]) -> tuple[str, float] | None:
    """Return the field of a model's configuration with its number of positions, and that number.

    Scaled rotary positions count as the positions that their factor gives. None if the configuration has no such field.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    given = scaling.get("factor") if isinstance(scaling, dict) else None
    factor: float = given if given is not None and is_number(given) else 1.0
    for name in NAMES:
        if is_number(config.get(name)):
            return name, config[name] * max(factor, 1)
    return None


def check_positions(folder: Path, config: dict[str, Any], seq_len: int) -> None:
    """Raise InputError if rows of ``--seq-len`` tokens are longer than the model's positions."""
    found = positions_of(config)
    if found is not None and seq_len > found[1]:
        raise InputError(
            f"--seq-len {seq_len}: expected at most {found[1]:g}, the positions of {folder}; give fewer, or raise {found[0]} "
            "in its config.json to train rotary positions beyond them"
        )

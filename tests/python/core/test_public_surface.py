"""Compare the public surface with the committed lists in the folder `public`.

A change of a public name, signature, default, operator schema, option or C++ declaration fails here. If the
change is intended, run `python scripts/public_surface.py --write` and describe it in CHANGELOG.md.
"""

import difflib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import public_surface  # noqa: E402


@pytest.mark.parametrize("part", public_surface.PARTS)
def test_public_surface_is_the_committed_list(part: str) -> None:
    committed = (public_surface.LISTS / f"{part}.txt").read_text().splitlines()
    found = public_surface.PARTS[part]()
    changes = [line for line in difflib.unified_diff(committed, found, lineterm="", n=0) if line[:2] != "@@"]
    assert not changes, "\n".join(
        ["the public surface differs from the committed list (see the top of this file):", *changes[2:]]
    )


def test_internal_names_are_not_public() -> None:
    """No public list has a name that begins with an underscore, or an operator that only autograd calls."""
    operators = public_surface.operators()
    assert operators
    internal = ("_backward(", "_forward(", "_rows(", "_rows_(", "apply_(", "ema_(", "scale_(")
    assert not [schema for schema in operators if any(part in schema for part in internal)]

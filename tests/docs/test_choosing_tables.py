"""The numbers and answers of docs/choosing.md and docs/guides/choosing_processes.md are what this code computes now."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoestring.training.estimate.config import EstimateConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import choosing_tables  # noqa: E402
from choosing_tables import CHOOSING, PROCESSES  # noqa: E402


@pytest.mark.parametrize(
    ("page", "computed"),
    [(CHOOSING, choosing_tables.choosing), (PROCESSES, choosing_tables.processes)],
    ids=["choosing", "processes"],
)
def test_pages_are_computed_now(page: Path, computed: Callable[[], str]) -> None:
    assert computed() == page.read_text(), "run scripts/choosing_tables.py --write"


def test_pages_have_a_row_for_each_way() -> None:
    assert PROCESSES.read_text().count("| 1.1 B |") == 5 + len(choosing_tables.WAYS)
    text = CHOOSING.read_text()
    assert all(f"| {name} | `{options}` |" in text for name, options in choosing_tables.TRAINED.items())


def test_default_of_double_quant() -> None:
    """The table has the commands above it, without --double-quant."""
    assert ("the default of `estimate`" in CHOOSING.read_text()) == (
        not EstimateConfig(model="1b").double_quant
    )

"""The length of a fuzzing run, and its seed."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # whose helpers these tests use


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=24.0,
        help="seconds of fuzzing, shared by all readers of both languages",
    )


@pytest.fixture
def seed() -> int:
    """Seed the mutations; pytest shows the print where a test fails. SHOESTRING_SEED repeats or varies a run."""
    value = int(os.environ.get("SHOESTRING_SEED", "1234"))
    print(f"SHOESTRING_SEED={value}")
    return value

"""Processes that are killed while they save. ``--all`` kills at every system call; without it, at a sample of them."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="kill at every system call, not at a sample")


@pytest.fixture
def seed() -> int:
    """Pytest shows the print where a test fails. SHOESTRING_SEED repeats or varies a run."""
    value = int(os.environ.get("SHOESTRING_SEED", "1234"))
    print(f"SHOESTRING_SEED={value}")
    return value

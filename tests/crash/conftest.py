"""Processes that are killed: at the system calls of every save, and in training at random times."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # whose helpers these tests use


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="kill at every system call, not at a sample")
    parser.addoption(
        "--kills", type=int, default=16, help="kills at random times, over all programs together"
    )


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed PyTorch; pytest shows the print where a test fails. SHOESTRING_SEED repeats or varies a run."""
    value = int(os.environ.get("SHOESTRING_SEED", "1234"))
    torch.manual_seed(value)
    print(f"SHOESTRING_SEED={value}")
    return value

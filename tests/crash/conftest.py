"""Options for tests that kill processes at system calls of a save, or at random times in training."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="kill at every system call, not at a sample")
    parser.addoption(
        "--kills", type=int, default=16, help="kills at random times, over all programs together"
    )

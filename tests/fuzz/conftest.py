"""The pytest option for the length of a fuzzing run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=24.0,
        help="seconds of fuzzing, shared by all readers of both languages",
    )

"""Fixtures and options of all Python test suites: the random seed, and tests that run in a new process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "python"))  # all suites use the helper modules in this folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1234, help="the seed of all random tests")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a background job with SIGINT ignored, and programs under test would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed PyTorch and return the seed. It is printed, because pytest shows the output of a failed test."""
    value: int = request.config.getoption("--seed")
    torch.manual_seed(value)
    print(f"--seed={value}")
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``fresh`` in a new process."""
    if pyfuncitem.get_closest_marker("fresh") is None or "SHOESTRING_FRESH" in os.environ:
        return None
    config = pyfuncitem.config
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        f"--seed={config.getoption('--seed')}",
        pyfuncitem.nodeid,
    ]
    environment = os.environ | {"SHOESTRING_FRESH": "1"}
    done = subprocess.run(command, cwd=config.rootpath, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return True

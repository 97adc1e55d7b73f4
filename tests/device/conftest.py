"""Fixtures of the device suite: the modes of the device, and the check for findings after each test.

Every test that asks for ``mode`` runs in lazy mode and with one seed of delays. ``--delay-seeds n`` runs ``n`` seeds,
and the eager mode besides.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from modes import mode_of
from simdev import device as simdev

simdev.load()

import shoestring  # noqa: E402, F401  (registers the operators)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--delay-seeds", type=int, default=1, help="how many seeds of delays every test runs with"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        count = metafunc.config.getoption("--delay-seeds")
        modes = ["lazy", *(f"delay{seed}" for seed in range(1, count + 1))] + ["eager"] * (count > 1)
        metafunc.parametrize("mode", modes, indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(torch, "simdev"):
        raise pytest.UsageError(
            f"{simdev.LIBRARY} is not built; run make build-tests, or set SHOESTRING_BUILD"
        )


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[simdev.Mode]:
    """Run the test in one mode of the device, and fail if the detector has findings at its end."""
    simdev.configure(mode_of(request.param))
    simdev.take_findings()
    yield mode_of(request.param)
    try:
        for index in range(simdev.device_count()):
            simdev.synchronize(index)
    finally:
        simdev.clear_error()
        simdev.configure(simdev.Mode())
    findings = simdev.take_findings()
    assert not findings, f"{len(findings)} findings, of which the first is\n{findings[0]}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run the CPU on one thread, as streams do, because sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

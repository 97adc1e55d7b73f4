"""Fixtures and options of all Python test suites: the random seed, and tests that run in a new process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# all test suites use the helper modules in tests/python
sys.path.insert(0, str(Path(__file__).parent / "python"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1234, help="the seed of all random tests")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a background job with SIGINT ignored, which programs that the tests start would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Test files that `make check` leaves out: they train, start many processes, or repeat a grid at length.
SLOW = {
    "test_attention_hopper.py",
    "test_attention_mixed.py",
    "test_bench_qlora.py",
    "test_checkpoint_exhaustive.py",
    "test_checkpoint_kill.py",
    "test_cli_finetune.py",
    "test_cli_train.py",
    "test_cross_entropy_inplace.py",
    "test_example_retrieval.py",
    "test_finetune_example.py",
    "test_install.py",
    "test_interrupts.py",
    "test_linear_cross_entropy_grids.py",
    "test_linear_cross_entropy_heads.py",
    "test_offload_fork.py",
    "test_optimizer_checkpoints.py",
    "test_optimizer_offload.py",
    "test_optimizer_offload_cpu.py",
    "test_optimizer_offload_device.py",
    "test_optimizer_unfinished.py",
    "test_run_damage.py",
    "test_run_lock.py",
    "test_train_gpt.py",
    "test_train_optimizers.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed PyTorch and return the seed. It is printed, because pytest shows the output of a failed test."""
    value: int = request.config.getoption("--seed")
    torch.manual_seed(value)
    print(f"--seed={value}")
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``fresh`` in a new pytest process of its own."""
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

"""Fixtures and options of all Python test suites: the random seed, tiers, and tests that run in a new process.

Tests that are marked ``nightly`` are left out. Of a test that is marked ``sample(n)``, ``n`` cases run, which the
seed draws; ``sample(simt=n)`` does so in the emulator only. ``--all-cases`` (``make nightly``) runs everything, and
``--tier`` selects a tier (``tiers.py``).
"""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

# all test suites use the helper modules in tests/python
sys.path[:0] = [str(Path(__file__).parent / "python"), str(Path(__file__).parent)]
import tiers  # noqa: E402

pytest.register_assert_rewrite("operator_tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1234, help="the seed of all random tests")
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="also run tests marked nightly, and all cases of tests marked sample",
    )
    parser.addoption(
        "--tier", choices=("first", "second"), help="the tests of `make test`, or the rest (see tiers.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a background job with SIGINT ignored, which programs that the tests start would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--tier") == "first":
        config.pluginmanager.register(tiers.Operators(config), "operators")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(tiers.Progress(config), "progress")


# The dictionary holds the outputs of failed tests by node ID, for each file whose tests marked fresh have run.
FAILURES = pytest.StashKey[dict[Path, dict[str, str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.add_marks(items)
    tier, seed = config.getoption("--tier"), config.getoption("--seed")
    left_out: set[pytest.Item] = set()
    # A test that is named on the command line runs whole.
    if not config.getoption("--all-cases") and not any("::" in argument for argument in config.args):
        left_out |= {item for item in items if item.get_closest_marker("nightly")}
        for name, cases in tiers.by_function(items).items():
            sample = cases[0].get_closest_marker("sample")
            if sample is None:
                continue
            count = sample.args[0] if sample.args else sample.kwargs.get(config.getoption("--backend", "cpu"))
            if count is not None and count < len(cases):
                left_out |= set(random.Random(f"{seed} {name}").sample(cases, len(cases) - count))
    if tier is not None:
        first = tiers.first_tier([item for item in items if item not in left_out], seed)
        left_out |= first if tier == "second" else set(items) - first
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Let garbage collection pass over the objects of the collected tests, which take it 0.3 s a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed PyTorch and return the seed. It is printed, because pytest shows the output of a failed test."""
    value: int = request.config.getoption("--seed")
    torch.manual_seed(value)
    print(f"--seed={value}")
    return value


@pytest.fixture
def blank_images() -> Iterator[pytest.MonkeyPatch]:
    """Leave the images of reports blank. A test that looks at one calls ``undo()`` of the result first."""
    from matplotlib.figure import Figure

    from blank_images import save_blank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_blank)
        yield patch


def run_fresh(config: pytest.Config, items: list[pytest.Item]) -> dict[str, str]:
    """Run tests in one new pytest process; return the output of each failed test by its node ID."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--junit-xml={report.name}"]
        command += [f"--seed={config.getoption('--seed')}", *(item.nodeid for item in items)]
        environment = os.environ | {"SHOESTRING_FRESH": "1"}
        done = subprocess.run(command, cwd=config.rootpath, env=environment, capture_output=True, text=True)
        text = Path(report.name).read_text()
    output = done.stdout[-4000:] + done.stderr[-1000:]
    # A process that crashes writes no report.
    cases = ElementTree.fromstring(text).iter("testcase") if text else []
    passed = {
        case.get("name") for case in cases if case.find("failure") is None and case.find("error") is None
    }
    return {item.nodeid: output for item in items if item.name not in passed}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``fresh``, and the others of its file, in a new pytest process.

    The first of these tests waits for the process, the others only report how they ended there.
    """
    if pyfuncitem.get_closest_marker("fresh") is None or "SHOESTRING_FRESH" in os.environ:
        return None
    failures = pyfuncitem.session.stash.setdefault(FAILURES, {})
    if pyfuncitem.path not in failures:
        items = [
            item
            for item in pyfuncitem.session.items
            if item.path == pyfuncitem.path and item.get_closest_marker("fresh")
        ]
        failures[pyfuncitem.path] = run_fresh(pyfuncitem.config, items)
    output = failures[pyfuncitem.path].get(pyfuncitem.nodeid)
    assert output is None, output
    return True

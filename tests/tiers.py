"""The two tiers of the Python tests: ``--tier=first`` is what `make test` runs, ``--tier=second`` is the rest.

The first tier leaves out the tests in ``slow.txt`` and those that are marked ``slow`` or ``alone``. Of every other
test it runs CASES cases, which the seed draws, or all if the test is marked ``first``. With the same seed, the second
tier runs all cases that the first left out, so that both together are the whole suite.

Every operator has to run in the first tier: each process records those that it calls, and the run fails if one of
them is missing. ``tests/python/core/test_first_tier.py`` looks for the other public names.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from build_folder import REPOSITORY, library

# Files and tests that take more than 2 s a case, or need programs that only `make test-all` builds.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().split())
SUITE = REPOSITORY / "tests/python"
OPERATORS = SUITE / "core/public/operators.txt"


def add_marks(items: list[pytest.Item]) -> None:
    """Mark the tests in slow.txt as slow."""
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in SLOW or test.partition("::")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test function, by its node ID."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return functions


def first_tier(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests of the first tier, out of those that the whole suite runs with this seed."""
    chosen: set[pytest.Item] = set()
    for name, cases in by_function(items).items():
        quick = [case for case in cases if not any(map(case.get_closest_marker, ("slow", "alone")))]
        if len(quick) > 2 and quick[0].get_closest_marker("first") is None:
            quick = pair(quick, random.Random(f"{seed} first {name}"))
        chosen.update(quick)
    return chosen


def pair(cases: list[pytest.Item], draw: random.Random) -> list[pytest.Item]:
    """Draw a case, and one of those that differ from it in most parameters: both values of each flag occur."""
    first = draw.choice(cases)
    own = parameters(first)
    differences = [sum(parameters(case)[name] is not own[name] for name in own) for case in cases]
    most = max(differences)
    others = [case for case, count in zip(cases, differences, strict=True) if count == most]
    return [first, draw.choice(others)]


def parameters(case: pytest.Item) -> dict[str, object]:
    """Return the parameters of a case. Cases of one test share the objects that are their values."""
    assert isinstance(case, pytest.Function)
    return case.callspec.params


class Progress:
    """Print the first failure when it happens, and with a tier every 15 seconds how much remains.

    The run goes on after a failure.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.has_failed = False
        self.start = self.last = time.monotonic()
        self.done = self.total = 0

    def terminal(self) -> pytest.TerminalReporter:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        return reporter

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed or self.has_failed:
            return
        self.has_failed = True
        terminal = self.terminal()
        terminal.write_sep("=", f"first failure: {report.nodeid}")
        terminal.write_line(report.longreprtext)
        terminal.write_sep("=", f"--seed={self.config.getoption('--seed')}; the other tests go on")

    def pytest_runtest_logfinish(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.config.getoption("--tier") is not None and now - self.last >= 15:
            self.last = now
            seconds = (now - self.start) / self.done * (self.total - self.done)
            self.terminal().write_line(f" {self.done} of {self.total} tests, about {seconds:.0f} s remain")


class Operators:
    """Record which operators each process runs, and fail a run of all tests if one has not run in any."""

    def __init__(self, config: pytest.Config) -> None:
        self.is_worker = hasattr(config, "workerinput")
        # Only a run of the whole suite has to run every operator.
        self.is_whole = any(Path(argument).resolve() == SUITE for argument in config.args)
        self.is_whole &= not config.getoption("collectonly")
        self.ran: set[str] = set()
        self.missing: list[str] = []
        torch.ops.load_library(str(library("librecorded_operators.so")))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.ran.update(getattr(node, "workeroutput", {}).get("operators", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.ran.update(torch.ops.recorded_operators.names())
        if self.is_worker:
            session.config.workeroutput["operators"] = sorted(self.ran)  # type: ignore[attr-defined]
            return
        public = {line.partition("(")[0] for line in OPERATORS.read_text().splitlines()}
        self.missing = sorted(public - self.ran) if self.is_whole else []
        if self.missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self.missing:
            terminalreporter.write_line(f"ERROR {name} ran in no test of the first tier")

"""Fixtures of the Python suites: the backend and the CPU capabilities.

``--backend`` selects what runs the operators. ``cpu`` is the default and runs every test. ``cuda`` runs the
CUDA kernels on the GPU. ``simt`` runs the CUDA kernels in the emulator (``tests/simt``), on the memory of CPU
tensors. With ``cuda`` and ``simt``, only tests marked ``device`` run. With ``cuda``, factory functions create
their tensors on the GPU.
"""

import ctypes
import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoestring  # noqa: F401  (registers the operators)
from build_folder import EMULATOR
from offload_faults import disturb_offload
from operator_cases import CAPABILITIES
from shoestring.checkpoint import weights

# Compute capabilities that the emulator can report.
GPUS = {
    "sm_75": 75,
    "sm_80": 80,
    "sm_86": 86,
    "sm_89": 89,
    "sm_90a": 90,
    "sm_100": 100,
    "sm_120": 120,
}
# For each set of kernels that host code selects, the GPU with the least shared memory. sm_75 has no attention.
EACH_GPU = ("sm_86", "sm_90a")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("cpu", "cuda", "simt"), default="cpu", help="what runs the operators"
    )
    parser.addoption(
        "--journal",
        type=Path,
        help="a file that gets a line of JSON when a test begins and when it has ended; tests that it names "
        "do not run again",
    )
    parser.addoption(
        "--seconds-per-test", type=float, default=60, help="with --journal: a longer test ends the process"
    )


class Journal:
    """Writes when each test begins and how it ended, so that no result is lost if a test ends the process.

    A failed test on the GPU may leave the CUDA context unusable for all tests after it. The process then ends,
    and a new one with the same journal runs the other tests.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self.outcome: dict[str, str] = {}

    def names(self) -> set[str]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {json.loads(line)["test"] for line in lines}

    def write(self, **line: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        faulthandler.dump_traceback_later(self.seconds, exit=True)
        self.write(test=nodeid)
        self.outcome = {"outcome": "passed"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            self.outcome = {"outcome": "failed", "message": message}
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.outcome = {"outcome": "skipped", "message": report.longrepr[2].removeprefix("Skipped: ")}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write(test=nodeid, **self.outcome)
        if self.outcome["outcome"] == "failed" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"the CUDA context is lost: {error}", flush=True)
                os._exit(3)


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--journal")) is not None:
        config.pluginmanager.register(Journal(path, config.getoption("--seconds-per-test")), "journal")
    backend = config.getoption("--backend")
    if backend == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError(
                "--backend=cuda: PyTorch sees no GPU here; --backend=simt runs the kernels without one"
            )
        torch.set_default_device("cuda")
    if backend == "simt":
        if not EMULATOR.exists():
            raise pytest.UsageError(
                f"--backend=simt: {EMULATOR} is not built; run make build-tests, or set SHOESTRING_BUILD"
            )
        torch.ops.load_library(str(EMULATOR))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (journal := config.pluginmanager.get_plugin("journal")) is not None:
        names = journal.names()
        items[:] = [item for item in items if item.nodeid not in names]
    if config.getoption("--backend") == "cpu":
        return
    elsewhere = [item for item in items if item.get_closest_marker("device") is None]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item.get_closest_marker("device") is not None]


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backend that runs the operators: "cpu", "cuda", or "simt" for the emulator of CUDA."""
    return request.config.getoption("--backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "capability" in metafunc.fixturenames:
        backend = metafunc.config.getoption("--backend")
        each = backend == "simt" and metafunc.definition.get_closest_marker("each_gpu")
        gpus = () if not each else GPUS if each.args == ("all",) else EACH_GPU
        params = CAPABILITIES if backend == "cpu" else gpus or (backend,)
        metafunc.parametrize("capability", params, indirect=True)


@pytest.fixture
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for each build of the kernels that the backend can select, and return the build's name.

    On the CPU, the builds are for the CPU capabilities plain, avx2, avx512 and amx; builds that this machine
    cannot run are skipped. In the emulator, a test marked ``each_gpu`` runs once for each compute capability
    in EACH_GPU, and one marked ``each_gpu("all")`` for each in GPUS. All other tests run once.
    """
    if request.param in GPUS:
        emulator = ctypes.CDLL(str(EMULATOR))
        emulator.simt_set_capability(GPUS[request.param])
        yield request.param
        emulator.simt_set_capability(80)
        return
    if request.param not in CAPABILITIES:
        yield request.param
        return
    before = torch.ops.shoestring._cpu_capability()
    if not torch.ops.shoestring._set_cpu_capability(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.shoestring._set_cpu_capability(before)


@pytest.fixture
def offload_device(backend: str) -> str:
    """Return the device for the tests of offload_activations; skip these tests in the emulator."""
    if backend == "simt":
        pytest.skip(
            "there are no kernels here, and the emulator runs those of compression from one thread only"
        )
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test on one thread, because in small operators many threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[0, 400], ids=["at once", "delayed"])
def delay(request: pytest.FixtureRequest) -> Iterator[int]:
    """Delay the start of every offload copy, read and write by a random time of at most 400 microseconds.

    Run the test with and without this delay.
    """
    disturb_offload(request.param)
    yield request.param
    disturb_offload()


@pytest.fixture
def small_weights_leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the matrices of small models leave, but not the weights of norms; end all faults of transfers."""
    monkeypatch.setattr(weights, "LEAST", 1024)
    yield
    disturb_offload()

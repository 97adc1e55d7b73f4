"""What the suites share: the backend and the CPU capabilities, and the error of a result against fp64.

``--backend`` names what runs the operators: ``cpu`` (the default, every test), or the CUDA kernels: ``cuda`` on the GPU,
``simt`` in the emulator (``tests/simt``), which lends them the memory of CPU tensors. With the last two, only tests
marked ``device`` run, and factory functions make their tensors where the backend wants them.
"""

import ctypes
from collections.abc import Iterator

import pytest
import torch

import shoestring  # noqa: F401  (registers the operators)
from build_folder import EMULATOR
from offload_faults import disturb_offload

CAPABILITIES = ("plain", "avx2", "avx512")
GPUS = {
    "sm_80": 80,
    "sm_90a": 90,
}  # that the emulator can say it is: host code chooses other kernels for each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=("cpu", "cuda", "simt"), default="cpu", help="what runs the operators"
    )


def pytest_configure(config: pytest.Config) -> None:
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
    if config.getoption("--backend") == "cpu":
        return
    elsewhere = [item for item in items if item.get_closest_marker("device") is None]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item.get_closest_marker("device") is not None]


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """What runs the operators: "cpu", "cuda" or "simt". The emulator wants small shapes."""
    return request.config.getoption("--backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "capability" in metafunc.fixturenames:
        backend = metafunc.config.getoption("--backend")
        each = backend == "simt" and metafunc.definition.get_closest_marker("each_gpu")
        params = CAPABILITIES if backend == "cpu" else GPUS if each else (backend,)
        metafunc.parametrize("capability", params, indirect=True)


@pytest.fixture
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each build of the CPU kernels that this machine has, or once on another backend; in the
    emulator once for each GPU that has kernels of its own, where the test is marked ``each_gpu``."""
    if request.param in GPUS:
        emulator = ctypes.CDLL(str(EMULATOR))
        emulator.simt_set_capability(GPUS[request.param])
        yield request.param
        emulator.simt_set_capability(80)
        return
    if request.param not in CAPABILITIES:
        yield request.param
        return
    before = torch.ops.shoestring.cpu_capability()
    if not torch.ops.shoestring.set_cpu_capability(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.shoestring.set_cpu_capability(before)


@pytest.fixture
def offload_device(backend: str) -> str:
    """Return the device on which the suites of offload_activations run."""
    if backend == "simt":
        pytest.skip(
            "there are no kernels here, and the emulator runs those of compression from one thread only"
        )
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operators on many threads wait for one another most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[0, 400], ids=["at once", "delayed"])
def delay(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every copy, read and write begins a random time late, at most so many microseconds."""
    disturb_offload(request.param)
    yield request.param
    disturb_offload()


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance to an fp64 reference; absolute (times 1e6) where the reference is all but zero."""
    exact = exact.detach().double()
    return ((result.detach().double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()

"""What the suites share: the backend and the CPU capabilities, a printed seed, and the error of a result against fp64.

``--backend`` names what runs the operators: ``cpu`` (the default, every test), or the CUDA kernels: ``cuda`` on the GPU,
``simt`` in the emulator (``tests/simt``), which lends them the memory of CPU tensors. With the last two, only tests
marked ``device`` run, and factory functions make their tensors where the backend wants them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoestring  # noqa: F401  (registers the operators)

CAPABILITIES = ("plain", "avx2", "avx512")
EMULATOR = Path(os.environ.get("SHOESTRING_BUILD", Path(__file__).parents[2] / "build")) / "tests/simt/libshoestring_simt.so"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=("cpu", "cuda", "simt"), default="cpu", help="what runs the operators")


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("--backend")
    if backend == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--backend=cuda: PyTorch sees no GPU here; --backend=simt runs the kernels without one")
        torch.set_default_device("cuda")
    if backend == "simt":
        if not EMULATOR.exists():
            raise pytest.UsageError(f"--backend=simt: {EMULATOR} is not built; run make build, or set SHOESTRING_BUILD")
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
        metafunc.parametrize("capability", CAPABILITIES if backend == "cpu" else (backend,), indirect=True)


@pytest.fixture
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each build of the CPU kernels that this machine has, or once on another backend."""
    if request.param not in CAPABILITIES:
        yield request.param
        return
    before = torch.ops.shoestring.cpu_capability()
    if not torch.ops.shoestring.set_cpu_capability(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    torch.ops.shoestring.set_cpu_capability(before)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds PyTorch; pytest shows the print where a test fails. SHOESTRING_SEED repeats or varies a run."""
    value = int(os.environ.get("SHOESTRING_SEED", "1234"))
    torch.manual_seed(value)
    print(f"SHOESTRING_SEED={value}")
    return value


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance to an fp64 reference; absolute (times 1e6) where the reference is all but zero."""
    exact = exact.detach().double()
    return ((result.detach().double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()

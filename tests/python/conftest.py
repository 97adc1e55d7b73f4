"""What the suites share: the CPU capabilities, a printed seed, and the error of a result against fp64."""

import os
from collections.abc import Iterator

import pytest
import torch

import shoestring  # noqa: F401  (registers the operators)

CAPABILITIES = ("plain", "avx2", "avx512")


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each build of the CPU kernels that this machine has."""
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

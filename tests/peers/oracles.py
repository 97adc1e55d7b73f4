"""How a case of a peer ends: passed, failed, or skipped because shoestring refuses an option that it needs.

A case is skipped only if the error names the option. ``python -m pytest tests/peers --all-cases -rs`` runs
every case and lists the refusals.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor


@contextmanager
def refused(option: str) -> Iterator[None]:
    """Skip the test if the body raises an error that names the option, and fail it otherwise."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        assert option in str(error), error
        pytest.skip(f"refused by name: {error}")
    pytest.fail(f"expected an error that names {option}, received none")


def error_of(result: Tensor, exact: Tensor, terms: float = 0.0) -> float:
    """Return the L2 norm of the error of a result, divided by that of its fp64 reference, or by ``terms``."""
    exact = exact.detach().double()
    return float((result.detach().double() - exact).norm() / exact.norm().clamp_min(max(terms, 1e-6)))

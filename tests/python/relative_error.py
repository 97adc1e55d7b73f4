"""The error of a result against its reference in fp64."""

import torch


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the L2 norm of the error of a result, divided by the L2 norm of its fp64 reference.

    If the norm of the reference is below 1e-6, the divisor is 1e-6.
    """
    exact = exact.detach().double()
    return ((result.detach().double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()

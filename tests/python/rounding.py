"""Bound the rounding errors of a computation, for tests that compare the errors of two implementations.

In a small test case, eager PyTorch's error may by luck be close to zero, since the few roundings may cancel or
be exact. So the error of eager PyTorch alone is no bound for the error of another implementation. This module
estimates the error that an implementation has without luck. It repeats the computation in fp64 with random
roundings of the narrower dtype, which is known as Monte Carlo arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from relative_error import relative_error

# Operators of one rounding for each element of the result.
ELEMENTWISE = set(
    "add sub rsub mul div reciprocal exp expm1 log log1p logaddexp tanh tanh_backward sigmoid sigmoid_backward "
    "pow square sqrt rsqrt sin cos erf silu silu_backward gelu gelu_backward".split()
)
# Operators that add several terms. They also round each term, or each partial sum.
SUMS = set(
    "sum mean mm bmm addmm baddbmm mv dot logsumexp _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data cumsum linalg_vector_norm norm".split()
)
# Operators that return the logarithm of a sum of exponentials. A rounding of the sum changes the logarithm by
# the unit roundoff, however small the logarithm is.
LOGARITHMS = {"logsumexp", "_log_softmax", "logaddexp"}
# An error may be this many times the root mean square of the errors with random roundings. The sum of many
# random roundings is nearly a Gaussian variable, which exceeds 5 standard deviations less than once in 10^6
# draws. Of these 5, one makes up for roundings that other implementations have, such as those of an
# approximated exponential function.
SPREAD = 5.0
DRAWS = 16


class RandomRoundings(TorchDispatchMode):
    """Multiply each result of fp64 arithmetic by 1 + e, where e is random, uniform and at most ``unit``.

    The terms of a sum are multiplied as well. For a sum of n terms, this gives an error of ``unit`` times the
    root of the sum of the squared terms, as the roundings of a pairwise sum do. Backward passes that run in
    this mode get roundings too.
    """

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SUMS:
            args = tree_map_only(Tensor, self.rounded, args)
        result = func(*args, **(kwargs or {}))
        if name in LOGARITHMS:
            result = result + self.unit * (2 * torch.rand_like(result) - 1)
        return tree_map_only(Tensor, self.rounded, result) if name in SUMS | ELEMENTWISE else result

    def rounded(self, x: Tensor) -> Tensor:
        return x * (1 + self.unit * (2 * torch.rand_like(x) - 1)) if x.dtype == torch.float64 else x


def rounding_errors(
    compute: Callable[[], Sequence[Tensor]],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
    error: Callable[[Tensor, Tensor], float] = relative_error,
) -> list[float]:
    """Return the largest error to expect of each result of ``compute`` if it is computed in ``dtype``.

    ``compute`` computes in fp64, and ``exact`` are its results without roundings. The errors are 5 times
    (SPREAD) the root mean square of the errors of 16 runs (DRAWS) with random roundings to ``dtype``.
    """
    squares = [0.0] * len(exact)
    for _ in range(DRAWS):
        with RandomRoundings(torch.finfo(dtype).eps / 2):
            results = compute()
        for i, (a, b) in enumerate(zip(results, exact, strict=True)):
            squares[i] += error(a, b) ** 2 / DRAWS
    return [SPREAD * math.sqrt(square) for square in squares]


def error_bounds(
    ours: Sequence[Tensor],
    eagers: Sequence[Tensor],
    exacts: Sequence[Tensor],
    compute: Callable[[], Sequence[Tensor]],
    factor: float,
    slack: float,
    computed: torch.dtype = torch.float32,
) -> list[float]:
    """Return the largest error that each result may have: ``factor`` times that of eager PyTorch, plus ``slack``.

    If an error of ``ours`` is greater, the bounds are at least what :func:`rounding_errors` expects of results that are
    computed in ``computed``. ``compute`` then returns all results in fp64.
    """
    bounds = [factor * relative_error(b, exact) + slack for b, exact in zip(eagers, exacts, strict=True)]
    if all(relative_error(a, exact) <= bound for a, exact, bound in zip(ours, exacts, bounds, strict=True)):
        return bounds
    return list(map(max, bounds, rounding_errors(compute, exacts, computed)))


def assert_no_worse(
    names: Sequence[str],
    ours: Sequence[Tensor],
    eagers: Sequence[Tensor],
    exacts: Sequence[Tensor],
    compute: Callable[[], Sequence[Tensor]],
    factor: float,
    slack: float,
    computed: torch.dtype = torch.float32,
) -> None:
    """Assert that errors are at most ``factor`` times those of eager PyTorch plus ``slack``, apart from luck."""
    bounds = error_bounds(ours, eagers, exacts, compute, factor, slack, computed)
    for name, a, b, exact, bound in zip(names, ours, eagers, exacts, bounds, strict=True):
        error, theirs = relative_error(a, exact), relative_error(b, exact)
        assert error <= bound, f"{name} in {a.dtype}: {error:.2e}, eager {theirs:.2e}, bound {bound:.2e}"

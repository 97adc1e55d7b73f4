"""Stochastic depth: residual branches that are left out at random, together with their work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo


def stochastic_depth(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    p: float,
    mode: Literal["row", "batch"] = "row",
    *,
    step: int,
    layer: int,
    seed: int = 0,
    training: bool = True,
) -> Tensor:
    """Add a residual branch to x, and leave out rows of it, or all of it, together with the work.

    The result is ``x + fn(x) / (1 - p)`` for the rows of x that are kept, and x for all others. ``fn`` is called
    with the kept rows only, or not at all, so time and memory of its forward and backward shrink as well.

    The kept rows are a pure function of seed, step and layer: recomputation in backward, a resumed run and C++
    keep the same rows. The host draws them and does not wait for the device. Each row is kept with probability
    ``1 - p``. The number of kept rows is ``(1 - p) * rows``, rounded up or down at random, so it takes at most
    two values.

    ``torch.compile`` breaks its graph where the rows are drawn. Compile ``fn`` itself to avoid that. Parameters
    of a branch that is left out have no gradient in that step; DistributedDataParallel then needs
    ``find_unused_parameters=True``.

    Args:
        fn: the branch. It maps rows to as many rows, of the shape of its argument.
        x: any dtype; the first dimension counts the rows.
        p: probability that a row is left out, in [0, 1).
        mode: ``"row"`` leaves out each row with probability p, ``"batch"`` all rows together.
        step: step of the training. Each step draws anew.
        layer: number of the branch in the model. Each branch draws on its own.
        seed: seed of the random numbers.
        training: False computes ``x + fn(x)``.

    Returns:
        The shape and dtype of x. The result never shares memory with x.

    Raises:
        ValueError: an option is out of range, or ``fn`` returns another shape.

    Example:
        >>> branch, x = torch.nn.Linear(8, 8), torch.randn(10, 8)
        >>> y = shoestring.stochastic_depth(branch, x, 0.4, step=0, layer=0)
        >>> int((y == x).all(dim=1).sum())  # the rows that were left out
        4

    Reference: G. Huang et al., Deep networks with stochastic depth, arXiv 1603.09382. The kept rows are computed
    as one smaller batch, as M. Oquab et al., DINOv2, arXiv 2304.07193, do.
    """
    if mode not in ("row", "batch"):
        raise ValueError(f'stochastic_depth: mode: expected "row" or "batch", received {mode!r}')
    if mode == "row" and x.dim() == 0:
        raise ValueError('stochastic_depth: x: expected at least one dimension with mode "row", received 0')
    rows = x.shape[0] if mode == "row" else 1
    p = p if training else 0.0
    kept_rows = _kept_rows(seed, step, layer, p, rows, x.device)
    if p > 0 and kept_rows.numel() == 0:
        return x.clone()
    if kept_rows.numel() == rows:
        return x.add(_branch(fn, x), alpha=1 / (1 - p))
    branch = _branch(fn, _selected(x, kept_rows))
    # index_add, out of place, would not keep the memory format.
    return x.clone().index_add_(0, kept_rows, branch, alpha=1 / (1 - p))


def stochastic_depth_rate(layer: int, layers: int, p: float) -> float:
    """Return the probability of a branch from the linear schedule over depth: ``p * (layer + 1) / layers``.

    Args:
        layer: number of the branch, counted from 0.
        layers: number of branches.
        p: probability of the last branch, in [0, 1).

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> [shoestring.stochastic_depth_rate(layer, 4, 0.4) for layer in range(4)]
        [0.1, 0.2, 0.30000000000000004, 0.4]

    Reference: G. Huang et al., arXiv 1603.09382.
    """
    if not 0 <= layer < layers:
        raise ValueError(
            f"stochastic_depth_rate: layer: expected a number in [0, layers), received {layer} of {layers}"
        )
    if not 0 <= p < 1:
        raise ValueError(f"stochastic_depth_rate: p: expected a probability in [0, 1), received {p}")
    return p * (layer + 1) / layers


@_disable_dynamo
def _kept_rows(seed: int, step: int, layer: int, p: float, rows: int, device: torch.device) -> Tensor:
    kept_rows: Tensor = torch.ops.shoestring._stochastic_depth_rows(seed, step, layer, p, rows, device)
    return kept_rows


def _branch(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = fn(x)
    if y.shape != x.shape:
        raise ValueError(
            f"stochastic_depth: fn: expected a result of the shape of its argument, {list(x.shape)}, "
            f"received {list(y.shape)}"
        )
    return y.to(x.dtype)


def _selected(x: Tensor, rows: Tensor) -> Tensor:
    """Select rows and keep the memory format, which index_select does not do for channels-last tensors."""
    for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dim and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return x.movedim(1, -1).index_select(0, rows).movedim(-1, 1)
    return x.index_select(0, rows)

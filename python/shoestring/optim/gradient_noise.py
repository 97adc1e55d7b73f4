"""The noise of gradients, the batch size that follows from it, and learning rates for other batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.foreach_norm import foreach_norm
from shoestring.optim.state_tensors import state_tensors

__all__ = ["GradientNoise", "scale_lr"]


class GradientNoise:
    """Measure the noise of gradients while a model trains, and from it the critical batch size.

    The gradients of micro-batches differ, and so do those of processes. From both follows how noisy the gradient
    of one row is, and how many rows a batch needs until the noise no longer outweighs the gradient. Over
    micro-batches, with ``accumulate()`` of an optimizer of ``shoestring.optim``::

        noise = GradientNoise(optimizer)
        for batches in data:
            for i, batch in enumerate(batches):
                with optimizer.accumulate() if i + 1 < len(batches) else nullcontext():
                    (loss_of(batch) / len(batches)).backward()
            noise.update(rows=len(batch), micro_batches=len(batches))  # before step()
            optimizer.step()
            optimizer.zero_grad()
        print(noise.critical_batch)

    Over processes, with ``ddp`` and any optimizer, call ``update(rows)`` after backward, where ``rows`` is the
    number of rows of one process.

    With b rows in a micro-batch and B in a step, the mean squared norms ``|g_b|^2`` and ``|g_B|^2`` of their
    gradients give the noise ``S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)``, which is the trace of the covariance of one
    row's gradient, and the square ``|G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)`` of the true gradient. Both are averaged
    exponentially, and divided afterwards. Losses are means over rows; a row may be a token.

    A norm is one pass over a gradient that backward has just written. ``update()`` does not wait for the device; the
    properties do.

    Args:
        optimizer: the optimizer that trains the model.
        decay: the factor of the old average of S and ``|G|^2``, in [0, 1).
        ddp: measure over the processes of this module. Its communication hook is registered, so it must not have
            one yet.

    Raises:
        ValueError: ``decay`` is out of range, or there is no ``ddp`` and the optimizer has no ``accumulate()``.

    Example:
        >>> from contextlib import nullcontext
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-2)
        >>> noise = shoestring.optim.GradientNoise(optimizer)
        >>> for i in range(4):
        ...     with optimizer.accumulate() if i < 3 else nullcontext():
        ...         (model(torch.randn(8, 4)).square().mean() / 4).backward()
        >>> noise.update(rows=8, micro_batches=4)
        >>> optimizer.step()
        >>> noise.critical_batch > 0
        True

    Reference: S. McCandlish et al., An empirical model of large-batch training, arXiv 1812.06162, appendix A.1.
    """

    def __init__(
        self, optimizer: Optimizer, *, decay: float = 0.99, ddp: DistributedDataParallel | None = None
    ) -> None:
        self._core: Any = torch.classes.shoestring.GradientNoise(decay)
        self._optimizer = optimizer
        self._ddp = ddp
        self._norms: list[Tensor] = []  # of this process's buckets, before the all-reduce
        if ddp is not None:
            ddp.register_comm_hook((self._norms, ddp.process_group), _norms_before_all_reduce)
        elif isinstance(optimizer, LowMemoryOptimizer):
            optimizer._core.set_takes_norms(True)
            optimizer._takes_norms = True
        else:
            raise ValueError(
                "GradientNoise: optimizer: expected one of shoestring.optim with accumulate(), or ddp=, received "
                f"{type(optimizer).__name__}"
            )

    @torch.no_grad()
    def update(self, rows: int, micro_batches: int | None = None) -> None:
        """Take the norms of a step's gradients, after its last backward and before ``step()``.

        Args:
            rows: the number of rows of each micro-batch, or with ``ddp`` of this process.
            micro_batches: the number of micro-batches, at least 2, by which their losses were divided. With
                ``ddp``, None.

        Raises:
            ValueError: a number is out of range, or there are no gradients to measure.
        """
        optimizer: Any = self._optimizer
        if self._ddp is None:
            count = 1 if micro_batches is None else micro_batches
            if count >= 2:
                optimizer._synchronize()
                square = optimizer._core.take_squares() * count
                self._core.observe(square, rows, optimizer._core.whole_square(), rows * count)
            else:
                self._core.observe(torch.zeros(()), rows, torch.zeros(()), rows * count)  # raises ValueError
            return
        if micro_batches is not None:
            raise ValueError(
                f"GradientNoise: micro_batches: expected None with ddp, received {micro_batches}: the gradients of "
                "all micro-batches of a process count as one"
            )
        if not self._norms:
            raise ValueError(
                "GradientNoise: gradients: expected a backward with all-reduce since the last update(), received none"
            )
        square = torch.stack(self._norms).square().sum()
        self._norms.clear()
        group = self._ddp.process_group
        torch.distributed.all_reduce(square, group=group)
        processes = torch.distributed.get_world_size(group)
        gradients = [p.grad for p in self._ddp.parameters() if p.grad is not None]
        whole = foreach_norm(gradients).square().sum()
        self._core.observe(square / processes, rows, whole, rows * processes)

    @property
    def noise(self) -> float:
        """S, the trace of the covariance of one row's gradient; NaN before the first update."""
        return float(self._core.noise())

    @property
    def square(self) -> float:
        """``|G|^2``, which may be negative while the noise outweighs it; NaN before the first update."""
        return float(self._core.square())

    @property
    def critical_batch(self) -> float:
        """``S / |G|^2``, in rows.

        Batches well below it train as many rows to the same loss; larger ones waste rows. It is infinite while
        ``|G|^2`` is not above 0, and NaN before the first update.
        """
        return float(self._core.critical_batch())

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the layout of ``state()`` in C++: ``"decay"`` and the tensor ``"averages"``."""
        state = dict(self._core.state())
        return {"decay": state["decay"].item(), "averages": state["averages"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of ``state_dict()``, or of ``state()`` in C++.

        Raises:
            ValueError: the state does not fit. Nothing has changed then.
        """
        self._core.load_state(state_tensors(state_dict))


def _norms_before_all_reduce(state: tuple[list[Tensor], Any], bucket: Any) -> torch.futures.Future[Tensor]:
    """Note the norm of a bucket's gradients, and reduce it as ``DistributedDataParallel`` does."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    norms, group = state
    norms.append(foreach_norm([bucket.buffer()])[0])
    return allreduce_hook(group, bucket)


# DistributedDataParallel compares annotations with classes, and those of this module are texts.
_norms_before_all_reduce.__annotations__.clear()


def scale_lr(
    lr: float,
    *,
    base_batch: float,
    batch: float,
    rule: Literal["sqrt", "linear"] = "sqrt",
    critical_batch: float | None = None,
) -> float:
    """Return the learning rate for another batch size.

    Args:
        lr: the learning rate that suits ``base_batch``.
        base_batch: the batch size of ``lr``, in rows.
        batch: the new batch size, in rows.
        rule: ``"sqrt"`` multiplies by the root of the ratio of the batch sizes, which suits Adam and its relatives
            (arXiv 2205.10287). ``"linear"`` multiplies by the ratio, which suits SGD (arXiv 1706.02677).
        critical_batch: both batch sizes count as at most this size, because neither rule holds beyond it.
            ``GradientNoise`` measures it.

    Returns:
        The learning rate.

    Raises:
        ValueError: a number is not above 0, or the rule does not exist.

    Example:
        >>> shoestring.optim.scale_lr(1e-3, base_batch=64, batch=256)
        0.002
        >>> shoestring.optim.scale_lr(0.5, base_batch=64, batch=1024, rule="linear", critical_batch=256)
        2.0
    """
    return float(torch.classes.shoestring.GradientNoise.scale_lr(lr, base_batch, batch, rule, critical_batch))

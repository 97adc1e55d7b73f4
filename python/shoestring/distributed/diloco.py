"""Training in which processes step alone, and average their weights every few hundred steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.distributed.compress import BITS, compressor
from shoestring.distributed.groups import group_or_default, name_of, operators
from shoestring.optim.schedule_free_adamw import ScheduleFreeAdamW
from shoestring.optim.sharded import local

BUCKET = 8 << 20  # elements that are sent together, unless a parameter has more


class _Bucket:
    """Parameters that are sent together, with the weights of the last average and the outer momentum."""

    def __init__(self, params: list[Tensor], momentum: bool) -> None:
        self.params = params
        self.anchor = torch.cat([local(p).detach().float().flatten() for p in params])
        self.momentum = torch.zeros_like(self.anchor) if momentum else None

    def difference(self) -> Tensor:
        """Return how far this process has gone against the direction of its steps, (elements), fp32."""
        delta = self.anchor.clone()
        begin = 0
        for p in self.params:
            own = local(p).detach()
            delta[begin : begin + own.numel()].sub_(own.flatten())
            begin += own.numel()
        return delta

    def move(self, mean: Tensor, lr: float, momentum: float) -> None:
        """Take an outer step with Nesterov's momentum, and give the parameters its weights."""
        if self.momentum is not None:
            self.momentum.mul_(momentum).add_(mean)
            mean.add_(self.momentum, alpha=momentum)
        self.anchor.sub_(mean, alpha=lr)
        begin = 0
        for p in self.params:
            own = local(p).detach()
            own.copy_(self.anchor[begin : begin + own.numel()].view_as(own))
            begin += own.numel()


class DiLoCo:
    """Average the weights of processes every few hundred steps, with an outer optimizer.

    Each process trains by itself. In every ``every``-th ``step()``, the processes average how far each has gone since
    the last average, and take an outer step of SGD with Nesterov's momentum in that direction. All processes then
    have the same weights, bit for bit; the state of their optimizers stays their own. A step sends 8 / ``every`` bytes
    a parameter on average, x (ranks - 1) / ranks, or with ``compress`` 2.03, 1.06 or 0.28 / ``every``.

    A process keeps 8 bytes a parameter (the averaged weights and the outer momentum, fp32), and with ``compress`` 4 +
    4 / ranks more. Parameters that are DTensors are averaged by their local parts: ``group`` then holds the ranks that
    have the same part of different replicas.

    Args:
        optimizer: the optimizer of this process, whose parameters are averaged. Rank 0's weights are copied to all
            ranks. It may be any optimizer that keeps no second copy of the weights.
        group: the processes; None for all.
        every: the number of steps from one average to the next.
        lr: the rate of the outer steps.
        momentum: the momentum of the outer steps; 0 for none.
        compress: "8bit", "4bit" or "1bit" sends differences in few bits, with error feedback; None in fp32.

    Call ``step()`` on all ranks after each training step, also if a guard or GradScaler has skipped the step.

    Raises:
        TypeError: the optimizer keeps a second copy of the weights, or a parameter has no floating-point dtype.
        ValueError: a number is out of range, or ``compress`` is unknown.
        RuntimeError: no process group was initialised, or the parameters of the ranks differ.

    Source: DiLoCo, arXiv 2311.08105.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 8)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> diloco = shoestring.distributed.DiLoCo(optimizer, every=2, compress="4bit")
        >>> for _ in range(4):
        ...     model(torch.randn(4, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     averaged = diloco.step()
        >>> averaged
        True
        >>> dist.destroy_process_group()
    """

    _name = "DiLoCo"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        every: int = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        compress: str | None = None,
    ) -> None:
        if every < 1:
            self._refuse("every", "at least 1", every)
        if not lr > 0:
            self._refuse("lr", "a number above 0", lr)
        if not 0 <= momentum < 1:
            self._refuse("momentum", "a number from 0 to below 1", momentum)
        if compress not in (None, *BITS):
            self._refuse("compress", f"None, {', '.join(BITS)}", repr(compress))
        params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
        remainder = any(g.get("weight_rounding") == "remainder" for g in optimizer.param_groups)
        if remainder or isinstance(optimizer, ScheduleFreeAdamW):
            raise TypeError(
                f"{self._name}: optimizer: expected one that keeps no second copy of the weights, received "
                f"{type(optimizer).__name__}{' with weight_rounding=remainder' if remainder else ''}. Use AdamW."
            )
        for p in params:
            if not p.is_floating_point():
                raise TypeError(
                    f"{self._name}: optimizer: expected floating-point parameters, received one in {p.dtype}"
                )
        self.every, self.lr, self.momentum, self.compress = every, lr, momentum, compress
        self._group = group_or_default(group, self._name)
        self._ranks = dist.get_world_size(self._group)
        self._core: Any = None
        if compress is not None and self._ranks > 1:
            self._core = compressor(self._group, compress)
        own = [local(p).detach() for p in params]
        names = [f"parameter {i}" for i in range(len(own))]
        operators()._broadcast_tensors(own, names, name_of(self._group), self._name)
        self._buckets: list[_Bucket] = []
        self._steps = 0
        by_device: dict[torch.device, list[Tensor]] = {}
        for p in params:
            by_device.setdefault(p.device, []).append(p)
        for of_device in by_device.values():
            while of_device:
                taken, elements = 0, 0
                while taken < len(of_device) and (taken == 0 or elements < BUCKET):
                    elements += local(of_device[taken]).numel()
                    taken += 1
                if elements > 0:
                    self._buckets.append(_Bucket(of_device[:taken], momentum > 0))
                del of_device[:taken]

    def _refuse(self, argument: str, expected: str, received: object) -> None:
        raise ValueError(f"{self._name}: {argument}: expected {expected}, received {received}")

    @property
    def steps(self) -> int:
        """The number of calls of ``step()``."""
        return self._steps

    def step(self) -> bool:
        """Count a training step, and average the weights if it is the ``every``-th.

        Returns:
            whether the weights were averaged.
        """
        self._steps += 1
        if self._steps % self.every != 0:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights and take an outer step now. All ranks must call it."""
        under_way: deque[tuple[_Bucket, Tensor, Callable[[], object]]] = deque()
        for number, bucket in enumerate(self._buckets):
            delta = bucket.difference()
            under_way.append((bucket, delta, self._send(delta, bucket, number)))
            # The Compressor completes a bucket when the second bucket after it is sent.
            if len(under_way) > 2:
                self._receive(*under_way.popleft())
        while under_way:
            self._receive(*under_way.popleft())

    def _send(self, delta: Tensor, bucket: _Bucket, number: int) -> Callable[[], object]:
        """Begin to average a difference; return a function that waits for it."""
        if self._ranks == 1:
            return lambda: None
        if self._core is None:
            work = dist.all_reduce(delta, group=self._group, async_op=True)
            return lambda: (work.wait(), delta.div_(self._ranks))
        # The anchor names the residual: local parts of DTensors are new tensors in each call.
        future = self._core.all_reduce(delta, [bucket.anchor], number, number == len(self._buckets) - 1)
        wait: Callable[[], object] = future.wait
        return wait

    def _receive(self, bucket: _Bucket, delta: Tensor, wait: Callable[[], object]) -> None:
        wait()
        bucket.move(delta, self.lr, self.momentum)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, the outer momentum and the number of steps.

        The residuals of ``compress`` are not part of it: a resumed run loses what its last average has left out.
        """
        return {
            "steps": self._steps,
            "anchor": [bucket.anchor for bucket in self._buckets],
            "momentum": [bucket.momentum for bucket in self._buckets],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``. The weights are not loaded: they are those of the model.

        Raises:
            ValueError: the state is that of other parameters, or of another ``momentum`` (none or some).
        """
        for name in ("anchor", "momentum"):
            own = [getattr(bucket, name) for bucket in self._buckets]
            found = state[name]
            sizes = [[None if t is None else t.numel() for t in tensors] for tensors in (own, found)]
            if sizes[0] != sizes[1]:
                self._refuse(f"state: {name}", f"buckets of {sizes[0]} elements", sizes[1])
            for mine, its in zip(own, found, strict=True):
                if mine is not None:
                    mine.copy_(its)
        self._steps = state["steps"]


class LocalSGD(DiLoCo):
    """Average the weights of processes every few steps.

    It is ``DiLoCo`` without an outer optimizer: in every ``every``-th ``step()``, each process receives the mean of
    all weights. It keeps 4 bytes a parameter.

    Args:
        optimizer: the optimizer of this process, whose parameters are averaged.
        group: the processes; None for all.
        every: the number of steps from one average to the next.
        compress: "8bit", "4bit" or "1bit" sends differences in few bits, with error feedback; None in fp32.

    Raises:
        TypeError, ValueError, RuntimeError: as ``DiLoCo``.

    Source: Local SGD, arXiv 1805.09767.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 8)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> averages = shoestring.distributed.LocalSGD(optimizer, every=8)
        >>> averages.step()
        False
        >>> dist.destroy_process_group()
    """

    _name = "LocalSGD"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        every: int = 8,
        compress: str | None = None,
    ) -> None:
        super().__init__(optimizer, group, every=every, lr=1.0, momentum=0.0, compress=compress)

"""Training in which processes step alone, and average their weights every few hundred steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.core.one_thread import one_thread
from shoestring.distributed.compress import BITS
from shoestring.distributed.groups import group_or_default, name_collectives, name_of, operators
from shoestring.optim.schedule_free_adamw import ScheduleFreeAdamW
from shoestring.optim.sharded import local

BUCKET = 8 << 20  # elements that are sent together, unless a parameter has more


class DiLoCo:
    """Average the weights of processes every few hundred steps, with an outer optimizer.

    Each process trains by itself. In every ``every``-th ``step()``, the processes average how far each has gone since
    the last average, and take an outer step of SGD with Nesterov's momentum in that direction. All processes then
    have the same weights, bit for bit; the state of their optimizers stays their own. A step sends 8 / ``every`` bytes
    a parameter on average, x (ranks - 1) / ranks, or with ``compress`` 2.03, 1.06 or 0.28 / ``every``.

    With ``fragments``, the parameters are dealt out to groups of about the same size, each with layers of all depths.
    Their averages are spread evenly over the period, so the most bytes of a step are fewer by this factor. With
    ``overlap``, training goes on while an average is on its way. The weights then become ``alpha`` times those of
    the process and 1 - ``alpha`` times the averaged ones. The averaged weights are equal on all processes; the weights
    of a process differ from them until the next average.

    A process keeps 8 bytes a parameter (the averaged weights and the outer momentum, fp32), and with ``compress`` 4 +
    4 / ranks more. An average takes 4 bytes for each parameter of a fragment, until its outer step. Parameters that
    are DTensors are averaged by their local parts: ``group`` then holds the ranks that have the same part of different
    replicas.

    Processes come and go: if a process ends, ``step()`` raises an error that names it, and nothing has changed. The
    others make a group of ``survivors()`` and call ``regroup()``. A process that joins makes its ``DiLoCo`` over the
    new group while the others call ``regroup()``; it receives the averaged weights, the momentum and the steps.

    Args:
        optimizer: the optimizer of this process, whose parameters are averaged. Rank 0's weights are copied to all
            ranks. It may be any optimizer that keeps no second copy of the weights.
        group: the processes; None for all. Errors of its collectives name the ranks and the collective from then on.
        every: the number of steps from one average of a parameter to the next.
        lr: the rate of the outer steps.
        momentum: the momentum of the outer steps; 0 for none.
        compress: "8bit", "4bit" or "1bit" sends differences in few bits, with error feedback; None in fp32.
        fragments: the number of groups of parameters, from 1 to ``every``. A parameter is never divided.
        overlap: the number of steps from the begin of an average to the outer step, from 0 (``step()`` waits) to
            below ``every``.
        alpha: the part of a process's own weights in its weights after an overlapped average, from 0 to below 1; None
            for 0.5, and without overlap 0.

    Call ``step()`` on all ranks after each training step, also if a guard or GradScaler has skipped the step.

    Threads may share the object: each call, ``steps`` too, waits until no other thread is in one. So it waits for an
    average that another thread takes, until all ranks have come or the timeout of the group is over.

    Raises:
        TypeError: the optimizer keeps a second copy of the weights, or a parameter has no floating-point dtype.
        ValueError: a number is out of range or differs between ranks, or ``compress`` is unknown.
        RuntimeError: no process group was initialised, or the parameters of the ranks differ.

    Source: DiLoCo, arXiv 2311.08105. Fragments, overlap and ``alpha``: Streaming DiLoCo, arXiv 2501.18512.

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
        fragments: int = 1,
        overlap: int = 0,
        alpha: float | None = None,
    ) -> None:
        if compress not in (None, *BITS):
            raise ValueError(
                f"{self._name}: compress: expected None, {', '.join(BITS)}, received {compress!r}"
            )
        remainder = any(g.get("weight_rounding") == "remainder" for g in optimizer.param_groups)
        if remainder or isinstance(optimizer, ScheduleFreeAdamW):
            raise TypeError(
                f"{self._name}: optimizer: expected one that keeps no second copy of the weights, received "
                f"{type(optimizer).__name__}{' with weight_rounding=remainder' if remainder else ''}. Use AdamW."
            )
        self._params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self._is_split = any(is_dtensor(p) for p in self._params)
        group = group_or_default(group, self._name)
        operators()
        name_collectives(group)
        self._core: Any = torch.classes.shoestring.Averaging(
            self._name,
            self._local_params(),
            name_of(group),
            every,
            lr,
            momentum,
            compress or "none",
            fragments,
            overlap,
            alpha,
            4 * BUCKET,
        )
        self._group = group  # is freed after the core; see split_steps

    @torch.no_grad()
    def _local_params(self) -> list[Tensor]:
        """Return the parameters, or the local parts of DTensors, which may be other tensors in each step."""
        return [local(p) for p in self._params]

    def _use(self) -> None:
        if self._is_split:
            self._core.use(self._local_params())

    @property
    def steps(self) -> int:
        """The number of calls of ``step()``."""
        return int(self._core.steps())

    @one_thread
    def step(self) -> bool:
        """Count a training step, and begin and end the averages that are due.

        Returns:
            whether weights were averaged.

        Raises:
            RuntimeError: a rank has failed. The step counts; the weights and the averaged weights are as before.
        """
        self._use()
        return bool(self._core.step())

    @one_thread
    def average(self) -> None:
        """Average all weights and take an outer step now. They are equal on all ranks then. All ranks must call it."""
        self._use()
        self._core.average()

    @one_thread
    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Go on with other processes.

        All ranks of the group must call it, or make a ``DiLoCo`` with the same arguments. Averaged weights of which
        another rank has a newer version come from there, as do the steps. The weights keep the progress of this
        process. Averages under way are dropped, and so is what the codes of ``compress`` have left out.

        Args:
            group: the processes; None for all, such as those of a new ``init_process_group``.

        Raises:
            ValueError: the arguments of the ranks differ.
            RuntimeError: no process group was initialised, or the parameters of the ranks differ.

        Example:
            >>> import torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> optimizer = shoestring.optim.AdamW(torch.nn.Linear(64, 8).parameters())
            >>> diloco = shoestring.distributed.DiLoCo(optimizer)
            >>> dist.destroy_process_group()  # the processes have changed
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> diloco.regroup()
            >>> dist.destroy_process_group()
        """
        group = group_or_default(group, self._name)
        name_collectives(group)
        self._use()
        self._core.regroup(name_of(group))
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, the outer momentum, the steps, and the averages that are under way.

        Any number of processes continues it. The residuals of ``compress`` are not part of it: a resumed run loses
        what its last average has left out. With ``overlap``, all ranks must call it.

        Returns:
            ``"steps"``; ``"anchor"``, ``"momentum"`` and ``"mean"``, which have a tensor or None for each bucket; and
            ``"begun"``, for each fragment the step at which its average under way began, or -1.
        """
        state = dict(self._core.state())
        buckets = range(sum(name.startswith("anchor.") for name in state))
        lists = {name: [state.get(f"{name}.{i}") for i in buckets] for name in ("anchor", "momentum", "mean")}
        return {"steps": int(state["steps"]), "begun": state["begun"].tolist(), **lists}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``. The weights are not loaded: they are those of the model.

        Raises:
            ValueError: the state is that of other parameters, of another number of fragments, or of another
                ``momentum`` (none or some). Nothing has changed then.
        """
        tensors = {
            f"{name}.{i}": tensor
            for name in ("anchor", "momentum", "mean")
            for i, tensor in enumerate(state.get(name, ()))
            if tensor is not None
        }
        # A state without "begun" has one fragment, and nothing under way.
        numbers = {name: torch.as_tensor(state.get(name, [-1])) for name in ("steps", "begun")}
        self._core.load_state(tensors | numbers)


class LocalSGD(DiLoCo):
    """Average the weights of processes every few steps.

    It is ``DiLoCo`` without an outer optimizer: in every ``every``-th ``step()``, each process receives the mean of
    all weights. It keeps 4 bytes a parameter.

    Args:
        optimizer: the optimizer of this process, whose parameters are averaged.
        group: the processes; None for all.
        every: the number of steps from one average of a parameter to the next.
        compress: "8bit", "4bit" or "1bit" sends differences in few bits, with error feedback; None in fp32.
        fragments: the number of groups of parameters that are averaged at different times; see ``DiLoCo``.
        overlap: the number of steps from the begin of an average to its end; see ``DiLoCo``.
        alpha: the part of a process's own weights after an overlapped average; see ``DiLoCo``.

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
        fragments: int = 1,
        overlap: int = 0,
        alpha: float | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            group,
            every=every,
            lr=1.0,
            momentum=0.0,
            compress=compress,
            fragments=fragments,
            overlap=overlap,
            alpha=alpha,
        )

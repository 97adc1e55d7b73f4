"""Optimizer steps on the CPU for parameters on a GPU (offload="cpu").

While the CPU steps some parameters, gradients of others are copied to host memory and stepped weights to the
GPU.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoestring.optim.arena import Arena, Layout, Moment
from shoestring.optim.foreach_norm import foreach_norm
from shoestring.optim.gradients import number_on
from shoestring.optim.sharded import gradient_in_hook, local

# Parameter bytes per bucket. The size gives full copy bandwidth, and lets copies overlap with steps.
BUCKET_BYTES = 8 << 20


@dataclass
class Bucket:
    """Consecutive parameters that are stepped together, once their gradients are in host memory."""

    group: dict[str, Any]
    arena: Arena
    first: int
    last: int
    # Indices (in the arena) of parameters whose gradient is being copied to the host.
    arrived: set[int] = field(default_factory=set)
    # Indices (in the arena) of parameters whose gradient of this step has been passed to a job.
    given: set[int] = field(default_factory=set)
    # Whether the bucket's job steps parameters; otherwise it only accumulates or collects gradients.
    steps: bool = False
    job: "Future[None] | None" = None

    @property
    def params(self) -> list[Tensor]:
        """The parameters of this bucket."""
        return self.arena.params[self.first : self.last]

    def is_complete(self) -> bool:
        """Return whether the copies to the host of all gradients of the bucket have been started."""
        return all(self.first + i in self.arrived for i, p in enumerate(self.params) if p.requires_grad)

    def wait(self) -> None:
        """Wait until the bucket's job has ended, so that its buffers may be reused.

        Raise the job's error, if any.
        """
        if self.job is not None:
            self.job.result()


def buckets(group: dict[str, Any], arena: Arena) -> list[Bucket]:
    """Split the parameters of an arena into buckets of about 8 MiB. A larger parameter has its own bucket."""
    found: list[Bucket] = []
    size = 0
    for i, p in enumerate(arena.local_params()):
        if not found or size + p.nbytes > BUCKET_BYTES:
            found.append(Bucket(group, arena, i, i))
            size = 0
        found[-1].last = i + 1
        size += p.nbytes
    return found


class HostSteps:
    """Mixin of the optimizers. With ``offload="cpu"``, it steps the parameters of a device on the CPU."""

    # This mixin uses the following attributes and methods of the optimizer.
    offload: str | None
    max_grad_norm: float | None
    step_in_backward: bool
    _watched: set[Tensor]
    param_groups: list[dict[str, Any]]
    _moments: tuple[Moment, ...]
    _accumulating: bool
    _pending: set[Tensor]
    _used: list[Tensor]
    _sums: dict[Tensor, Tensor]
    _broken: str | None
    _stepped_in_backward: bool
    _backwards: set[int]
    _drop_sums: Callable[[], None]
    _check_process: Callable[[], None]
    _layout: Callable[[int, dict[str, Any]], Layout]
    _into_arena: Callable[[Arena], list[Tensor]]
    _step_values: Callable[..., None]

    def _init_host_steps(self) -> None:
        # The bucket of each parameter, and its index in the arena.
        self._buckets: dict[Tensor, tuple[Bucket, int]] = {}
        self._jobs: list[Bucket] = []  # buckets whose gradients are being copied or whose job is running
        self._worker: ThreadPoolExecutor | None = None
        # Gradients in host memory that are clipped and stepped once the norm over all parameters is known.
        self._collected: dict[Tensor, Tensor] = {}
        # The L2 norms of the gradients in _collected. The keys are the data pointers of the gradients.
        self._known_norms: dict[int, Tensor] = {}

    @property
    def _steps_from_hooks(self) -> bool:
        return self.step_in_backward or (self.offload == "cpu" and bool(self._watched))

    def _norms_of(self, grads: list[Tensor]) -> Tensor:
        """Return the L2 norm of each gradient. Norms that were computed during backward are reused."""
        if not self._known_norms:
            return foreach_norm(grads)
        known = [self._known_norms.get(g.data_ptr()) if g.numel() else None for g in grads]
        return torch.cat(
            [foreach_norm([g]) if norm is None else norm for g, norm in zip(grads, known, strict=True)]
        )

    # ---- step of all parameters -----------------------------------------------------------------------------

    def _on_host(self, arena: Arena, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Copy the gradients of all parameters of an arena to host memory and wait for the copies."""
        for i, (p, own, grad) in enumerate(zip(arena.params, arena.device_params(), grads, strict=True)):
            if grad is not None or p in self._pending or p in self._collected:
                arena.host.fetch(i, own, grad)
        fetched = arena.host.collect(0, len(grads))
        arena.has_fetched = True
        found = []
        for p, here, grad in zip(arena.params, fetched, grads, strict=True):
            # The host buffer may still hold a gradient of a failed step, so use it only if the parameter has
            # a gradient now.
            found.append(self._collected.get(p, None if grad is None else here))
        return found

    def _step_on_host(
        self,
        group: dict[str, Any],
        arena: Arena,
        grads: list[Tensor | None],
        accumulated: Tensor | None,
        *factors: Any,
    ) -> None:
        """Step the parameters of an arena on the CPU, bucket by bucket.

        The copies of all gradients are started before the first bucket is stepped. Stepped weights are copied
        to the device while later buckets are stepped.
        """
        if not arena.has_fetched:
            for i, (p, grad) in enumerate(zip(arena.device_params(), grads, strict=True)):
                if grad is not None and i >= arena.next_param:
                    arena.host.fetch(i, p, grad)
        factors = tuple(number_on(arena.kind.device, factor) for factor in factors)
        for bucket in buckets(group, arena):
            if bucket.first < arena.next_param:
                continue
            own = grads[bucket.first : bucket.last]
            fetched = arena.host.collect(bucket.first, bucket.last)
            if not arena.has_fetched:
                own = [None if grad is None else here for grad, here in zip(own, fetched, strict=True)]
            self._step_bucket(bucket, own, accumulated is not None, *factors)
            arena.next_param = bucket.last
        arena.has_fetched, arena.next_param = False, 0
        arena.host.receive()

    # ---- within backward ------------------------------------------------------------------------------------

    def _arrive(self, param: Tensor) -> None:
        """Start copying a parameter's gradient to the host, where it is stepped or accumulated.

        Free the gradient after the copy.
        """
        if param not in self._buckets or (
            self._buckets[param][0].arena.accumulated is None and self._accumulating
        ):
            self._find_buckets()
        bucket, index = self._buckets[param]
        if index in bucket.given or (index in bucket.arrived and not self._accumulating):
            # Before step(), a second backward without accumulate() is an error. Forget this backward, so that
            # its error does not drop the gradients of the previous backward, which stay valid for step().
            self._backwards.clear()
            raise RuntimeError(
                f"{type(self).__name__}: step_in_backward: expected step() after each backward, received a second gradient "
                "of a parameter; use accumulate() around all backwards but the last of a step"
            )
        # An earlier backward of the same micro-batch has left a gradient in the bucket.
        if index in bucket.arrived:
            self._send_job(bucket)
        bucket.wait()
        bucket.arena.host.fetch(index, local(param), gradient_in_hook(param))
        param.grad = None
        if not bucket.arrived:
            self._jobs.append(bucket)
        bucket.arrived.add(index)
        if self._accumulating:
            self._pending.add(param)
        if bucket.is_complete():
            self._send_job(bucket)

    def _find_buckets(self) -> None:
        self._drain()
        self._buckets.clear()
        layouts = [self._layout(index, group) for index, group in enumerate(self.param_groups)]
        for group, layout in zip(self.param_groups, layouts, strict=True):
            for arena in layout.arenas:
                if self._accumulating or any(p in self._pending for p in arena.params):
                    self._into_arena(arena)
                for bucket in buckets(group, arena):
                    for i, p in enumerate(bucket.params, bucket.first):
                        self._buckets[p] = (bucket, i)

    def _send_job(self, bucket: Bucket) -> None:
        """Start a job in the worker thread that accumulates, collects or steps the gradients of a bucket.

        A single worker thread runs the jobs in the order of the calls.
        """
        if self._accumulating:
            job = self._add_up
        elif self.max_grad_norm is not None:
            job = self._keep
        else:
            job = self._step_bucket
        arrived, bucket.arrived = bucket.arrived, set()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, f"{type(self).__name__} on the CPU")
        bucket.steps = job == self._step_bucket
        self._stepped_in_backward |= bucket.steps
        summed = {bucket.arena.params[i] for i in arrived} & self._pending
        if not self._accumulating:
            self._pending -= summed
            bucket.given |= arrived
        bucket.job = self._worker.submit(self._run, job, bucket, summed)

    @staticmethod
    @torch.no_grad()
    def _run(job: Callable[..., None], bucket: Bucket, summed: set[Tensor]) -> None:
        job(bucket, bucket.arena.host.collect(bucket.first, bucket.last), summed)

    def _add_up(self, bucket: Bucket, grads: list[Tensor | None], summed: set[Tensor]) -> None:
        for p, grad in zip(bucket.params, grads, strict=True):
            if grad is not None:
                self._sums[p].add_(grad)

    def _keep(self, bucket: Bucket, grads: list[Tensor | None], summed: set[Tensor]) -> None:
        for p, grad in zip(bucket.params, grads, strict=True):
            if grad is None:
                continue
            if p in summed:
                grad = self._sums[p].add_(grad)
                self._used.append(grad)
            self._collected[p] = grad
            self._known_norms[grad.data_ptr()] = foreach_norm([grad])

    def _step_bucket(
        self, bucket: Bucket, grads: list[Tensor | None], summed: bool | set[Tensor], coefficient: Any = None,
        found_inf: Any = None,
    ) -> None:  # fmt: skip
        """Step the parameters of a bucket with gradients in host memory, and copy the weights to the device.

        ``summed`` is true if some of the parameters have gradient sums over micro-batches, which are then
        added.
        """
        piece = bucket.arena.run(bucket.first, bucket.last, self._moments)
        self._step_values(
            bucket.group, piece, grads, piece.accumulated if summed else None, coefficient, found_inf
        )
        stepped = [i for i, grad in enumerate(grads) if grad is not None]
        params = piece.device_params()
        bucket.arena.host.send([bucket.first + i for i in stepped], [params[i] for i in stepped])

    def _flush(self) -> None:
        """Start the jobs of all buckets that hold gradients, including incomplete buckets."""
        for bucket in self._jobs:
            if bucket.arrived:
                self._send_job(bucket)

    def _drain(self) -> None:
        """Wait until all jobs of the worker thread that steps on the CPU are done.

        Later work on the device sees the new weights.
        """
        self._flush()
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._check_process()
        ended = [(bucket.steps, bucket.job.exception()) for bucket in jobs if bucket.job is not None]
        for bucket in jobs:
            bucket.job = None
            bucket.given.clear()
            bucket.arena.host.receive()
        errors = [error for _, error in ended if error is not None]
        if not errors:
            return
        if any(steps and error is None for steps, error in ended):
            self._broken = "weights"
        elif self._broken is None and self._sums:
            self._broken = "sums"
        elif self._broken is None:
            self._drop_sums()
        raise errors[0]

    def _drop_collected(self) -> None:
        self._collected.clear()
        self._known_norms.clear()

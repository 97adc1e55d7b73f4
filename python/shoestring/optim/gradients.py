"""Gradient handling of the optimizers: sums over micro-batches, clipping, and steps within backward."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from shoestring.core.storages import same_memory
from shoestring.optim.arena import Arena, Layout, Moment
from shoestring.optim.foreach_norm import foreach_norm
from shoestring.optim.offload import commit
from shoestring.optim.sharded import (
    Shards,
    gradient_in_hook,
    is_dtensor,
    local,
    local_gradient,
    reduced_after_hooks,
    shards,
    whole_norm,
)


@overload
def number_on(device: torch.device, number: Tensor) -> Tensor: ...
@overload
def number_on(device: torch.device, number: Tensor | None) -> Tensor | None: ...
def number_on(device: torch.device, number: Tensor | None) -> Tensor | None:
    """Convert a one-element tensor to the device and dtype that the operators expect."""
    return None if number is None else number.to(device, torch.float32, non_blocking=device.type != "cpu")


def total_norm(grads: list[Tensor], norms_of: Callable[[list[Tensor]], Tensor] = foreach_norm) -> Tensor:
    """Return the L2 norm over all gradients together, in fp32 on the first gradient's device.

    The host does not wait for the device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in grads:
        by_device.setdefault(g.device, []).append(g)
    result: Tensor = torch.linalg.vector_norm(
        torch.cat([norms_of(same).to(grads[0].device) for same in by_device.values()])
    )
    return result


def norm_over(
    shares: list[tuple[Shards | None, list[Tensor]]],
    norms_of: Callable[[list[Tensor]], Tensor] = foreach_norm,
) -> Tensor:
    """Return the L2 norm over all gradients, including their shards on other processes.

    All processes get the same norm.
    """
    by_shards: dict[Shards | None, list[Tensor]] = {}
    for piece, grads in shares:
        by_shards.setdefault(piece, []).extend(grads)
    norms = [whole_norm(total_norm(grads, norms_of), piece) for piece, grads in by_shards.items() if grads]
    return (
        norms[0]
        if len(norms) == 1
        else torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    )


def clip_coef(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients to ``max_norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Gradients:
    """Mixin of the optimizers. It sums, clips and collects gradients, whatever the update rule."""

    max_grad_norm: float | None
    grad_norm: Tensor | None
    step_in_backward: bool
    accumulate_dtype: torch.dtype
    # This mixin uses the following attributes and methods of the optimizer.
    param_groups: list[dict[str, Any]]
    _moments: tuple[Moment, ...]
    offload: str | None
    _collected: dict[Tensor, Tensor]
    _arrive: Callable[[Tensor], None]
    _flush: Callable[[], None]
    _drain: Callable[[], None]
    _on_host: Callable[[Arena, list[Tensor | None]], list[Tensor | None]]
    _drop_collected: Callable[[], None]
    _begin_backward: Callable[[], None]
    _end_backward: Callable[[], None]
    _check_whole: Callable[[str], None]
    _check_process: Callable[[], None]
    _abandon: Callable[[], None]
    _init_unfinished: Callable[[], None]
    _init_host_steps: Callable[[], None]
    _stepped_in_backward: bool
    _broken: str | None
    _norms_of: Callable[[list[Tensor]], Tensor]
    _layout: Callable[[int, dict[str, Any]], Layout]
    _step_arena: Callable[..., None]

    def _init_gradients(
        self, max_grad_norm: float | None, step_in_backward: bool, dtype: torch.dtype
    ) -> None:
        self.max_grad_norm, self.step_in_backward, self.accumulate_dtype = (
            max_grad_norm,
            step_in_backward,
            dtype,
        )
        self.grad_norm = None
        # The gradient sum of each parameter over micro-batches. The sums become views of the arenas once
        # these exist.
        self._sums: dict[Tensor, Tensor] = {}
        self._pending: set[Tensor] = set()  # parameters whose gradient sum holds a gradient
        # Gradient sums that the current step uses as gradients, and sets to zero at its end.
        self._used: list[Tensor] = []
        self._accumulating = False
        self._watched: set[Tensor] = set()
        # Whether DistributedDataParallel replicates the parameters. None until the first gradient hook has
        # run.
        self._is_replicated: bool | None = None
        # For steps in backward: the group of each parameter, and an arena that holds only this parameter.
        self._alone: dict[Tensor, tuple[dict[str, Any], Arena]] = {}
        # Norms of gradients that were freed after their step in backward.
        self._norms: list[tuple[Shards | None, Tensor]] = []
        self._init_unfinished()

    def _gradient_options(self) -> dict[str, Any]:
        return {
            "max_grad_norm": self.max_grad_norm,
            "step_in_backward": self.step_in_backward,
            "accumulate_dtype": self.accumulate_dtype,
        }

    def _has_gradient(self, param: Tensor) -> bool:
        return param.grad is not None or param in self._pending or param in self._collected

    # ---- sums over micro-batches ---------------------------------------------------------------------------

    @_disable_dynamo
    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within this context manager, add gradients to sums over micro-batches.

        Use it around forward and backward of every micro-batch of a step except the last. Each gradient is
        added to a sum in ``accumulate_dtype``, which takes 4 or 2 bytes per parameter. ``.grad`` is freed as
        soon as it has been added to the sum. With fp32 sums the only error is fp32 rounding, whatever the
        gradients' dtype. Run the last micro-batch of a step outside the context: ``step()``, or the step
        within backward, adds its gradient to the sum. Divide the loss by the number of micro-batches as
        usual. ``zero_grad()`` does not drop the sums, unless a micro-batch raised an error. A step drops the
        sums, also if a GradScaler skips the step.

        Raises:
            RuntimeError: the last step or backward failed half-way; the message says how to go on.
        """
        self._check_process()
        self._end_backward()
        self._check_whole("accumulate")
        self._abandon()
        self._watch((p for group in self.param_groups for p in group["params"]), always=True)
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            try:
                self._flush()
            finally:
                self._accumulating = before

    def _watch(self, params: Iterable[Tensor], always: bool = False) -> None:
        """Register gradient hooks on parameters.

        Without ``always``, do so only if parameters are stepped in backward.
        """
        if not (always or self.step_in_backward):
            return
        optimizer = weakref.ref(self)

        def on_gradient(param: Tensor) -> None:
            self = optimizer()
            if self is not None and param.grad is not None:
                with torch.no_grad():
                    self._on_gradient(param)

        for p in params:
            if p.requires_grad and p not in self._watched:
                self._watched.add(p)
                p.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, param: Tensor) -> None:
        if self._is_replicated is None and not is_dtensor(param):
            self._is_replicated = reduced_after_hooks(self._watched)
        if self._is_replicated and self.step_in_backward:
            raise RuntimeError(
                f"{type(self).__name__}: step_in_backward: expected gradients that are complete in backward, received those "
                "of DistributedDataParallel, which all-reduces them later; use fully_shard, or step_in_backward=False"
            )
        if self._accumulating or self.step_in_backward:
            self._begin_backward()
        if self.offload == "cpu" and (self._accumulating or self.step_in_backward):
            self._arrive(param)
        elif self._accumulating:
            self._add(param)
        elif self.step_in_backward:
            self._step_alone(param)
        elif self._is_replicated and param in self._pending:
            # DistributedDataParallel all-reduces .grad after this hook, so .grad must include the sum.
            self._drain()
            assert param.grad is not None
            param.grad.add_(self._sums[param].to(param.grad.device))
            self._sums[param].zero_()
            self._pending.discard(param)

    def _add(self, param: Tensor) -> None:
        grad = gradient_in_hook(param)
        if param not in self._sums:
            self._sums[param] = torch.zeros_like(
                grad, dtype=self.accumulate_dtype, memory_format=torch.contiguous_format
            )
        self._sums[param].add_(grad)
        self._pending.add(param)
        param.grad = None

    def _into_arena(self, arena: Arena) -> list[Tensor]:
        """Copy the gradient sums of an arena's parameters into one flat tensor of the arena.

        Return each parameter's view.
        """
        views = arena.accumulated_views(self.accumulate_dtype)
        for p, view in zip(arena.params, views, strict=True):
            if p in self._pending and not same_memory(self._sums[p], view):
                view.copy_(self._sums[p])
            self._sums[p] = view
        return views

    def _gathered(self, arenas: list[Arena], scaled: bool) -> list[tuple[list[Tensor | None], Tensor | None]]:
        """Return the gradients of each arena, with the sums over micro-batches that the step adds (or None).

        If clipping or a GradScaler needs the norm of the complete gradient before the step, this method adds
        the gradients to the sums. It then returns the sums as the gradients, and None.
        """
        if scaled and self._pending and getattr(self, "grad_scale", None) is None:
            raise RuntimeError(
                f"{type(self).__name__}: step: expected scaled gradients, like the sums of accumulate(), "
                "received gradients after GradScaler.unscale_; to clip, use max_grad_norm, which unscales "
                "by itself"
            )
        if self._pending and self._is_replicated:
            raise RuntimeError(
                f"{type(self).__name__}: step: expected a last micro-batch outside of accumulate() that has a gradient for "
                "every parameter, received sums that DistributedDataParallel has not reduced"
            )
        found: list[tuple[list[Tensor | None], Tensor | None]] = []
        for arena in arenas:
            grads = [local_gradient(p) if arena.is_sharded else p.grad for p in arena.params]
            if arena.host is not None and any(
                p in self._pending or p in self._collected for p in arena.params
            ):
                grads = self._on_host(arena, grads)
            if not self._pending or not any(p in self._pending for p in arena.params):
                found.append((grads, None))
                continue
            views = self._into_arena(arena)
            whole = scaled or self.max_grad_norm is not None
            for i, (p, view) in enumerate(zip(arena.params, views, strict=True)):
                if p not in self._pending:
                    continue
                grad = grads[i]
                if whole:
                    self._used.append(view)
                    grads[i] = view if grad is None else view.add_(grad)
                elif grad is None:
                    grads[i] = torch.zeros_like(local(p), device=arena.kind.device)
            found.append((grads, None if whole else arena.accumulated))
        return found

    def _drop_sums(self) -> None:
        for view in self._used:
            view.zero_()
        self._used.clear()
        self._pending.clear()
        self._drop_collected()

    # ---- clipping ------------------------------------------------------------------------------------------

    def _clip(
        self, shares: list[tuple[Shards | None, list[Tensor | None]]], found_inf: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``found_inf`` and the factor that clips all gradients.

        ``found_inf`` is 1 also if a gradient sum is not finite.
        """
        if self.step_in_backward and self.offload != "cpu":
            return found_inf, None
        self.grad_norm = None
        present = [(piece, [g for g in grads if g is not None]) for piece, grads in shares]
        looks = found_inf is not None and self._pending
        if not any(grads for _, grads in present) or (self.max_grad_norm is None and not looks):
            return found_inf, None
        norm = norm_over(present, self._norms_of)
        # The GradScaler has checked only the gradients of the last micro-batch, not the sums.
        if looks and found_inf is not None:
            found_inf = torch.maximum(number_on(norm.device, found_inf), (~norm.isfinite()).float())
        if self.max_grad_norm is None:
            return found_inf, None
        scale = number_on(norm.device, getattr(self, "grad_scale", None))
        self.grad_norm = norm if scale is None else norm / scale.squeeze()
        return found_inf, clip_coef(self.grad_norm, self.max_grad_norm)

    # ---- steps within backward -----------------------------------------------------------------------------

    def _step_alone(self, param: Tensor) -> None:
        """Step one parameter within backward. Its gradient is complete."""
        if param in self._pending and (param not in self._alone or self._alone[param][1].accumulated is None):
            self._alone.clear()
        if param not in self._alone:
            self._find_alone()
        group, arena = self._alone[param]
        arena.check_place(type(self).__name__)
        grad, accumulated = gradient_in_hook(param), arena.accumulated if param in self._pending else None
        coefficient = None
        if self.max_grad_norm is not None:
            if accumulated is not None:
                grad = self._sums[param].add_(grad)
                accumulated = None
            self._norms.append((shards(param), foreach_norm([grad])[0]))
            if self.grad_norm is not None:
                coefficient = clip_coef(self.grad_norm, self.max_grad_norm)
        try:
            self._step_arena(group, arena, [grad], accumulated, coefficient, None)
        except BaseException as error:
            in_part = arena.offloaded is not None and arena.offloaded.any_done()
            self._stepped_in_backward |= in_part or not isinstance(error, Exception)
            arena.stepped = None
            raise
        self._stepped_in_backward = True
        if arena.offloaded is not None:
            commit([arena])
        if self.max_grad_norm is not None and param in self._pending:
            self._sums[param].zero_()
        self._pending.discard(param)
        param.grad = None

    def _find_alone(self) -> None:
        layouts = [self._layout(index, group) for index, group in enumerate(self.param_groups)]
        for group, layout in zip(self.param_groups, layouts, strict=True):
            for arena in layout.arenas:
                if any(p in self._pending for p in arena.params):
                    self._into_arena(arena)
                for i, p in enumerate(arena.params):
                    self._alone[p] = (group, arena.run(i, i + 1, self._moments))

    def _finish_backward(self) -> None:
        # Parameters may have been replaced since the gradient hooks were registered, so register missing
        # hooks.
        self._watch(p for group in self.param_groups for p in group["params"])
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                f"{type(self).__name__}: step: expected no GradScaler with step_in_backward=True, received one: weights are "
                "stepped before it knows whether all gradients are finite; use bf16, or step_in_backward=False"
            )
        if self._norms:
            self.grad_norm = norm_over([(piece, [norm]) for piece, norm in self._norms])
            self._norms.clear()

    def _restore_norm(self, norm: Tensor | None) -> None:
        """Reset gradient sums and hooks after a state dict was loaded.

        Also restore ``grad_norm``, with which the next backward clips gradients if it steps parameters.
        """
        self._norms.clear()
        self._used.clear()
        self._init_unfinished()
        self._alone.clear()
        self._sums.clear()
        self._pending.clear()
        self._init_host_steps()
        if self.step_in_backward:
            self.grad_norm = None if norm is None else norm.clone()

"""The base class of the optimizers.

It keeps the moments of many parameters in flat, quantised tensors (an arena). One operator call steps all
parameters of an arena.
"""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from typing_extensions import TypedDict

from shoestring.optim.arena import (
    ROUNDINGS,
    STATES,
    Arena,
    Kind,
    Layout,
    Moment,
    Part,
    make_arena,
    offloaded_bytes,
    parts,
)
from shoestring.optim.gradients import Gradients, number_on
from shoestring.optim.host import HostSteps
from shoestring.optim.interrupts import Uninterrupted
from shoestring.optim.offload import Offloading, is_place, pieces
from shoestring.optim.sharded import local, seed_of, shards
from shoestring.optim.state_dicts import StateDicts
from shoestring.optim.unfinished import UnfinishedSteps, Work

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LowMemoryOptions(TypedDict, total=False):
    """Keyword arguments of every optimizer.

    A parameter group may override state_format, min_quantize_size, weight_rounding, seed and maximize.

    state_format: how moments are stored. "8bit" and "4bit" store codes in blocks, each with an fp32 scale.
        "bf16" rounds stochastically, and "fp32" is exact. A moment that moves less per step than one
        quantisation level is stored in bf16 instead of 8 or 4 bits; the docstring of the optimizer names such
        moments.
    min_quantize_size: parameters with fewer elements have fp32 state.
    weight_rounding: how bf16 weights are updated. "nearest" rounds to nearest, which loses updates below half
        a unit in the last place. "stochastic" rounds up or down at random so that the expected value is exact.
        "remainder" stores 16 more bits per weight, which gives exactly the updates of fp32 weights.
    seed: seed of stochastic rounding. Random bits depend on the seed, the step, the position of the parameter
        in the optimizer and the index of the element in the parameter. They are the same on every device and
        for every number of threads.
    maximize: ascend the gradient instead of descending it.
    max_grad_norm: clip gradients to this norm, taken over all parameters of the optimizer that have a
        gradient. The result is that of ``torch.nn.utils.clip_grad_norm_``, but the step clips internally and
        ``.grad`` does not change. As in PyTorch, an infinite norm makes finite gradients zero and others NaN,
        and a NaN norm makes all of them NaN; a GradScaler skips such steps. The attribute may be changed
        between steps.
    step_in_backward: step each parameter as soon as its gradient is complete, then free the gradient. All
        gradients are thus never alive at once. ``step()`` must still be called after each backward, but it
        steps no parameter. Clipping then uses the norm of the previous step, which is an approximation, and
        the first step is not clipped. Not supported with a GradScaler.
    accumulate_dtype: torch.float32 or torch.bfloat16, the dtype of the gradient sums of ``accumulate()``.
    offload: where the optimizer state is stored: None, "cpu", "stream" or "nvme:DIR".

    - None: on the parameters' device.
    - "stream": in host memory, pinned for a GPU.
    - "nvme:DIR": in an unnamed file in the folder DIR. The space is reserved at construction and freed when
      the process ends.
    - "cpu": in host memory, and the CPU takes the steps.

    With "stream" and "nvme", a step copies the state to the device in chunks, and overlaps the copies with
    the computation of other chunks. Results are bit for bit those without offload. The device holds 4 chunks
    of 8 MiB each; a chunk may be larger if the operator cannot divide a parameter. ``state`` and
    ``state_dict()`` then hold CPU tensors, memory-mapped for "nvme". If a read or a write fails, ``step()``
    raises RuntimeError with the file and the position. Some parameters have been stepped then and the others
    have not. No state is lost: calling ``step()`` again with the same gradients finishes the step. With
    ``step_in_backward`` the gradients are already gone, so load a checkpoint instead.

    With "cpu", gradients are copied to the host, and updated weights to the device, in buckets of about 8
    MiB. While one bucket is copied, another is stepped. The host buffers, pinned for a GPU, take 2 bytes per
    bf16 parameter for gradients and 2 for weights. ``.grad`` stays until ``step()``, so GradScaler, manual
    clipping and logging work as usual. With ``step_in_backward``, a gradient is copied to the host as soon as
    it is complete, and is stepped while backward continues. With ``max_grad_norm`` as well, the host collects
    the gradients and their norms during backward and ``step()`` applies them; this clipping is exact. Each
    backward then needs its own ``step()``. The gradient sums of ``accumulate()`` are in host memory, too. If
    a parameter was changed between steps, its copy in host memory is updated. The optimizer detects changes
    by the parameter's version counter, so it misses in-place changes through ``.data``.
    """

    state_format: str
    min_quantize_size: int
    weight_rounding: str
    seed: int
    maximize: bool
    max_grad_norm: float | None
    step_in_backward: bool
    accumulate_dtype: torch.dtype
    offload: str | None


class LowMemoryOptimizer(StateDicts, Offloading, UnfinishedSteps, HostSteps, Gradients, Optimizer):
    """The base class of the optimizers. It does everything except the update rule.

    A subclass names its moments (running means) and the operator that takes a step. The operator is called as
    ``operator(params, grads, step, moment, scales, ..., lr=, **rule, **arguments)``, like
    ``shoestring.ops.adamw_``, with the arguments of ``shoestring.optim.optimizer.StepArguments``. A rule may
    keep tensors besides its moments (see ``_extra``); each is passed as a list with one tensor per parameter.
    """

    _moments: tuple[Moment, ...]
    _operator: ClassVar[Callable[..., None]]
    _splits: ClassVar[bool] = True  # whether the optimizer's operator can step a part of a parameter
    # This attribute tells GradScaler.step to set grad_scale and found_inf on the optimizer.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_format: str = "8bit",
        min_quantize_size: int = 0,
        weight_rounding: str = "nearest",
        seed: int = 0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        step_in_backward: bool = False,
        accumulate_dtype: torch.dtype = torch.float32,
        offload: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            known = ", ".join([*defaults, *LowMemoryOptions.__annotations__])
            raise TypeError(
                f"{self._name}: {next(iter(unknown))}: expected one of the options {known}, received another"
            )
        positive = max_grad_norm is None or max_grad_norm > 0
        self._expect(positive, "max_grad_norm", "None or a number above 0", max_grad_norm)
        is_known = accumulate_dtype in (torch.float32, torch.bfloat16)
        self._expect(is_known, "accumulate_dtype", "torch.float32 or torch.bfloat16", accumulate_dtype)
        self._expect(is_place(offload), "offload", 'None, "cpu", "stream" or "nvme:DIR"', offload)
        # The arenas of each parameter group. The keys are the indices of the groups.
        self._layouts: dict[int, Layout] = {}
        self._init_gradients(max_grad_norm, step_in_backward, accumulate_dtype)
        self._init_offload(offload)
        own = dict(
            state_format=state_format,
            min_quantize_size=min_quantize_size,
            weight_rounding=weight_rounding,
            seed=seed,
            maximize=maximize,
        )
        self._is_made = False
        super().__init__(params, defaults | own)
        self._reserve(self.param_groups)
        self._is_made = True

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the operator that are special to this optimizer, such as betas.

        The arguments come from the options of the parameter group.
        """
        raise NotImplementedError

    def _check_rule(self, group: dict[str, Any]) -> None:
        """Raise ValueError if an option that is special to this optimizer, such as betas, is invalid."""
        raise NotImplementedError

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of a parameter's fp32 state tensors that are not in flat tensors (arenas).

        Moments are not included.
        """
        return {}

    def _expect(self, good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise ValueError(f"{self._name}: {name}: expected {expected}, received {received!r}")

    def _check_options(self, group: dict[str, Any]) -> None:
        lr, size = group["lr"], group["min_quantize_size"]
        is_number = lr.numel() == 1 if isinstance(lr, Tensor) else isinstance(lr, Real)
        positive = is_number and float(lr) >= 0
        self._expect(positive, "lr", "a number of at least 0", lr)
        self._check_rule(group)
        self._expect(
            group["state_format"] in STATES,
            "state_format",
            " or ".join(f'"{s}"' for s in STATES),
            group["state_format"],
        )
        self._expect(
            group["weight_rounding"] in ROUNDINGS,
            "weight_rounding",
            " or ".join(f'"{w}"' for w in ROUNDINGS),
            group["weight_rounding"],
        )
        self._expect(
            isinstance(size, int) and size >= 0, "min_quantize_size", "a whole number of at least 0", size
        )
        self._expect(isinstance(group["seed"], int), "seed", "a whole number", group["seed"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``.

        Its options are checked before anything changes.
        """
        group = {**self.defaults, **param_group}
        self._check_options(group)
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        seen = set()
        for i, item in enumerate(param_group["params"]):
            param = item[1] if isinstance(item, tuple) else item
            if isinstance(param, Tensor) and param.dtype not in DTYPES:
                raise ValueError(
                    f"{self._name}: params[{i}]: expected fp32, bf16 or fp16, received {param.dtype}"
                )
            if (
                group["weight_rounding"] != "nearest"
                and isinstance(param, Tensor)
                and param.dtype == torch.float16
            ):
                raise ValueError(
                    f'{self._name}: params[{i}]: weight_rounding="{group["weight_rounding"]}" expects bf16 (or fp32, on which '
                    f"it has no effect), received {param.dtype}"
                )
            # Refuse a flattened parameter of FSDP1, since it does not say which part of which tensor it
            # holds.
            if getattr(param, "_fsdp_flattened", False):
                raise ValueError(
                    f"{self._name}: params[{i}]: expected plain or DTensor parameters, received one of "
                    "FullyShardedDataParallel; use torch.distributed.fsdp.fully_shard"
                )
            if id(param) in seen:
                raise ValueError(
                    f"{self._name}: params[{i}]: expected each parameter once, received a duplicate"
                )
            seen.add(id(param))
        super().add_param_group(param_group)
        self._watch(param_group["params"])
        for p in param_group["params"]:
            self._offload_of(local(p).device)
        # When the constructor adds groups, it reserves disk space for all of them later.
        if not self._is_made:
            return
        try:
            self._reserve(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def _reserve(self, groups: list[dict[str, Any]]) -> None:
        """Reserve disk space for the state of all trainable parameters of ``groups``.

        Raises:
            RuntimeError: the disk has no space left.
        """
        if not self._streams:
            return
        sizes: dict[torch.device, int] = {}
        for group in groups:
            members: dict[Kind, list[Tensor]] = {}
            for p in group["params"]:
                if p.requires_grad:
                    members.setdefault(self._kind(p, group), []).append(p)
            for kind, params in members.items():
                size = offloaded_bytes(
                    params, kind, self._moments, self._offload_of(kind.source), self._splits
                )
                sizes[kind.source] = sizes.get(kind.source, 0) + size
        for device, size in sizes.items():
            self._offloads[device].reserve(size)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Return the result of ``closure``, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with Uninterrupted():
            self._check_process()
            self._end_backward()
            self._drain()
            self._check_whole("step")
            if self.step_in_backward:
                self._finish_backward()
            self._step_all()
        return loss

    def _work(self) -> list[Work]:
        """Return the arguments of ``_step_arena`` for each arena. Leave out groups without gradients."""
        if self.step_in_backward:
            # Backward may have stepped state in chunks on the device. Write these chunks back to the host or
            # disk first, so that nothing is lost if this step fails and drops its own chunks.
            self._bring_back()
        calls = []
        for index, group in enumerate(self.param_groups):
            if any(self._has_gradient(p) for p in group["params"]):
                calls += [(group, arena) for arena in self._layout(index, group).arenas]
        found_inf = getattr(self, "found_inf", None)
        try:
            gradients = self._gathered([arena for _, arena in calls], found_inf is not None)
            shares = [
                (arena.kind.shards, grads) for (_, arena), (grads, _) in zip(calls, gradients, strict=True)
            ]
            found_inf, coefficient = self._clip(shares, found_inf)
        except BaseException:
            # Some gradients have been added to the sums, so a repeated step would add them twice.
            if self._used:
                self._broken = "sums"
            raise
        return [(*call, *own, coefficient, found_inf) for call, own in zip(calls, gradients, strict=True)]

    def _step_arena(
        self,
        group: dict[str, Any],
        arena: Arena,
        grads: list[Tensor | None],
        accumulated: Tensor | None,
        coefficient: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if arena.host is not None:
            self._step_on_host(group, arena, grads, accumulated, coefficient, found_inf)
        elif arena.offloaded is None:
            self._step_values(group, arena, grads, accumulated, coefficient, found_inf)
        else:
            for piece, own, sums in pieces(arena, grads, accumulated):
                self._step_values(group, piece, own, sums, coefficient, found_inf)

    def _step_values(
        self,
        group: dict[str, Any],
        arena: Arena,
        grads: list[Tensor | None],
        accumulated: Tensor | None,
        coefficient: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        lr, device = group["lr"], arena.kind.device
        on_device = isinstance(lr, Tensor) and lr.device == device
        moments: list[Tensor | None] = []
        for m in self._moments:
            moments += [arena.values[m.name]]
            moments += [] if m.long else [arena.values.get(f"{m.name}_scale")]
        extra = {n: [self.state[p][n] for p in arena.params] for n in self._extra(arena.params[0], group)}
        type(self)._operator(
            arena.local_params(),
            grads,
            arena.step,
            *moments,
            lr=0.0 if on_device else float(lr),
            **self._rule(group),
            **extra,
            maximize=group["maximize"],
            lr_tensor=lr.detach().float() if on_device else None,
            grad_scale=number_on(device, getattr(self, "grad_scale", None)),
            clip_coef=number_on(device, coefficient),
            found_inf=number_on(device, found_inf),
            weight_remainder=arena.values.get("weight_remainder"),
            accumulated=accumulated,
            stochastic_rounding=group["weight_rounding"] == "stochastic",
            seed=seed_of(group["seed"], arena.kind.shards),
            numbers=arena.numbers,
            **({} if arena.part is None else dict(zip(("first_block", "blocks"), arena.part, strict=True))),
        )

    def _kind(self, param: Tensor, group: dict[str, Any]) -> Kind:
        own = local(param)
        device = torch.device("cpu") if self.offload == "cpu" else own.device
        state = group["state_format"] if param.numel() >= group["min_quantize_size"] else "fp32"
        remainder = group["weight_rounding"] == "remainder" and own.dtype == torch.bfloat16
        return Kind(state, remainder, device, shards(param), own.device)

    def _layout(self, index: int, group: dict[str, Any]) -> Layout:
        """Return a group's arenas (flat state). Allocate them again if a parameter has its first gradient.

        Arenas hold the parameters that have state or a gradient, and those that hooks step or accumulate in
        backward.
        """
        layout = self._layouts.get(index)
        for arena in () if layout is None else layout.arenas:
            arena.check_place(self._name)
        if layout is not None and layout.holds(group["params"], self._has_gradient):
            return layout
        members: dict[Kind, dict[int, Tensor]] = {}
        absent = []
        first = sum(len(g["params"]) for g in self.param_groups[:index])
        for number, p in enumerate(group["params"], first):
            # A gradient hook may step this parameter or accumulate its gradient in backward, so its state
            # must exist before backward.
            if self.state.get(p) or self._has_gradient(p) or (self._steps_from_hooks and p.requires_grad):
                members.setdefault(self._kind(p, group), {})[number] = p
            else:
                absent.append(p)
        for arena in () if layout is None else layout.arenas:
            if arena.offloaded is not None:  # wait until state that was stepped in backward is written back
                arena.offloaded.finish()
        arenas: list[Arena] = []
        # self.state is replaced only after all arenas exist, so that an out-of-memory error changes nothing.
        states: dict[Tensor, dict[str, Any]] = {}
        for kind, params in members.items():
            offload = self._offload_of(kind.source)
            on_host = self.offload == "cpu"
            arena, own = make_arena(params, kind, self._moments, self.state, offload, self._splits, on_host)
            arenas.append(arena)
            for p, entry in own.items():
                for name, shape in self._extra(local(p), group).items():
                    entry.setdefault(name, torch.zeros(shape, dtype=torch.float32, device=kind.device))
            states |= own
        for p, entry in states.items():
            self.state[p] = entry
        # Drop the arenas of single parameters in _alone, since they are views of the arenas that were
        # replaced.
        self._alone.clear()
        self._buckets.clear()
        layout = self._layouts[index] = Layout(arenas, absent)
        return layout

    def _parts(self, param: Tensor, group: dict[str, Any]) -> list[Part]:
        kind = self._kind(param, group)
        return parts(self._moments, kind.state, kind.remainder)

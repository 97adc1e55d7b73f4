"""What the optimizers share: moments in flat arenas, in few bits, and one operator call for all of an arena."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from typing_extensions import TypedDict

from shoestring.optim.arena import (
    STATES,
    WEIGHTS,
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
    """Keyword arguments that every optimizer has; a group may have its own of the first five.

    state: how moments are kept: "8bit" or "4bit", codes in blocks with fp32 scales; "bf16", rounded stochastically; or
        "fp32". One that moves by less in a step than codes are apart is bf16 in place of codes, as its class says.
    min_quantize_size: parameters with fewer elements have fp32 state.
    weights: how bf16 weights take an update: "plain", rounded to nearest, which loses updates below half a unit in
        the last place; "stochastic", rounded up or down so that the mean is right; or "remainder", with 16 more bits a
        weight: exactly as fp32 weights would.
    seed: of what is rounded stochastically. Random bits follow from it, the number of the step, that of the parameter in
        the optimizer, and the place of the element in it: the same on every device, however the work is divided.
    maximize: ascend instead.
    max_grad_norm: gradients are clipped to this norm, over all parameters of the optimizer that have one, as by
        ``torch.nn.utils.clip_grad_norm_`` but within the step, so that ``.grad`` stays as it is. An infinite norm makes
        finite gradients zero and others NaN, a NaN norm makes all NaN, as there; a GradScaler skips such steps. The
        attribute may be changed between steps.
    step_in_backward: each parameter is stepped as soon as its gradient is complete, which is then freed: gradients are
        never all alive. ``step()`` still has to be called, after each backward; it only counts. Clipping then is by the
        norm of the step before (the first is not clipped), which is not the same. Not for a GradScaler.
    accumulate_dtype: torch.float32 or torch.bfloat16: what ``accumulate()`` adds gradients in.
    offload: where the state lies: None, on the parameters' device; "cpu" (below); "stream", in host memory, page-locked for
        a GPU; or "nvme:DIR", in a file without a name in the folder DIR, whose space is reserved first and free again when the
        process ends. A step takes it to the device in chunks, some of which are read and written meanwhile, and does the
        same, bit for bit. State takes 4 chunks of memory there, 8 MiB each (one that a step cannot divide, of a single
        parameter, may be larger). ``state`` and ``state_dict()`` have CPU tensors then (the file's: mapped). Where
        something cannot be read or written, ``step()`` raises RuntimeError with the file and the place; parameters
        before it are stepped and the others are not, nothing is lost, and calling ``step()`` again, with the gradients as
        they are, finishes that step. With ``step_in_backward`` gradients are gone by then: load a checkpoint.
        "cpu": in host memory, and the CPU steps it. Gradients go there and weights come back, page-locked for a GPU, each
        2 bytes a bf16 parameter, in buckets of some 8 MiB: while one is copied, another is stepped. ``.grad`` stays until
        ``step()``, so that GradScaler, clipping by hand and logging work as ever. With ``step_in_backward`` gradients
        leave as soon as they are complete and are stepped while backward runs on. With ``max_grad_norm`` as well they are
        collected, their norms taken in backward, and ``step()`` applies them: this clipping is exact. Each backward then
        needs its ``step()``. Sums of ``accumulate()`` are in host memory, too. Changes of parameters between steps are
        seen by their version counters; those through ``.data`` that keep the memory are not.
    """

    state: str
    min_quantize_size: int
    weights: str
    seed: int
    maximize: bool
    max_grad_norm: float | None
    step_in_backward: bool
    accumulate_dtype: torch.dtype
    offload: str | None


class LowMemoryOptimizer(StateDicts, Offloading, UnfinishedSteps, HostSteps, Gradients, Optimizer):
    """Everything but the rule. A subclass names its moments and its operator, and hands over its options.

    The operator is called as ``operator(params, grads, step, moment, scales, ..., lr=, **rule, **arguments)``, as
    ``shoestring.ops.adamw_``, with the arguments of ``shoestring.optim.optimizer.StepArguments``. Where a rule has more
    tensors for a parameter than moments, it has them in lists, one for each parameter.
    """

    _moments: tuple[Moment, ...]
    _operator: ClassVar[Callable[..., None]]
    _splits: ClassVar[bool] = True  # the operator steps parts of parameters
    _step_supports_amp_scaling = True  # GradScaler.step then sets grad_scale and found_inf on the optimizer

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state: str = "8bit",
        min_quantize_size: int = 0,
        weights: str = "plain",
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
        self._layouts: dict[int, Layout] = {}  # by the group's position
        self._init_gradients(max_grad_norm, step_in_backward, accumulate_dtype)
        self._init_offload(offload)
        own = dict(
            state=state, min_quantize_size=min_quantize_size, weights=weights, seed=seed, maximize=maximize
        )
        self._is_made = False
        super().__init__(params, defaults | own)
        self._reserve(self.param_groups)
        self._is_made = True

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        """The operator's own arguments, from a group's options."""
        raise NotImplementedError

    def _check_rule(self, group: dict[str, Any]) -> None:
        """Raises ValueError (by ``_expect``) where one of the rule's own options does not fit."""
        raise NotImplementedError

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a parameter's fp32 tensors beside its moments, if the rule has any."""
        return {}

    def _expect(self, good: bool, name: str, expected: str, received: object) -> None:
        if not good:
            raise ValueError(f"{self._name}: {name}: expected {expected}, received {received!r}")

    def _check_options(self, group: dict[str, Any]) -> None:
        lr, size = group["lr"], group["min_quantize_size"]
        positive = (not isinstance(lr, Tensor) or lr.numel() == 1) and float(lr) >= 0
        self._expect(positive, "lr", "a number of at least 0", lr)
        self._check_rule(group)
        self._expect(group["state"] in STATES, "state", " or ".join(f'"{s}"' for s in STATES), group["state"])
        self._expect(
            group["weights"] in WEIGHTS, "weights", " or ".join(f'"{w}"' for w in WEIGHTS), group["weights"]
        )
        self._expect(
            isinstance(size, int) and size >= 0, "min_quantize_size", "a whole number of at least 0", size
        )
        self._expect(isinstance(group["seed"], int), "seed", "a whole number", group["seed"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim.Optimizer``; its options are checked first."""
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
            if group["weights"] != "plain" and isinstance(param, Tensor) and param.dtype == torch.float16:
                raise ValueError(
                    f'{self._name}: params[{i}]: weights="{group["weights"]}" expects bf16 (or fp32, which it leaves '
                    f"as they are), received {param.dtype}"
                )
            if getattr(
                param, "_fsdp_flattened", False
            ):  # its pieces say neither where they begin nor what they are of
                raise ValueError(
                    f"{self._name}: params[{i}]: expected plain or DTensor parameters, received one of "
                    "FullyShardedDataParallel; use torch.distributed.fsdp.fully_shard"
                )
            if id(param) in seen:
                raise ValueError(
                    f"{self._name}: params[{i}]: expected each parameter once, received one again"
                )
            seen.add(id(param))
        super().add_param_group(param_group)
        self._watch(param_group["params"])
        for p in param_group["params"]:
            self._offload_of(local(p).device)
        if not self._is_made:  # the constructor makes room for all groups at once
            return
        try:
            self._reserve(self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def _reserve(self, groups: list[dict[str, Any]]) -> None:
        """Makes room on the disk for the state of all trainable parameters of these groups.

        Raises:
            RuntimeError: the disk has no room.
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
        """Steps every parameter that has a gradient; returns what the closure, if any, returns."""
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
        """For each arena that has gradients, what ``_step_arena`` takes."""
        if self.step_in_backward:  # so that a step that fails can drop its chunks
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
            if self._used:  # some have a gradient in them
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
            stochastic_rounding=group["weights"] == "stochastic",
            seed=seed_of(group["seed"], arena.kind.shards),
            numbers=arena.numbers,
            **({} if arena.part is None else dict(zip(("first_block", "blocks"), arena.part, strict=True))),
        )

    def _kind(self, param: Tensor, group: dict[str, Any]) -> Kind:
        own = local(param)
        device = torch.device("cpu") if self.offload == "cpu" else own.device
        state = group["state"] if param.numel() >= group["min_quantize_size"] else "fp32"
        remainder = group["weights"] == "remainder" and own.dtype == torch.bfloat16
        return Kind(state, remainder, device, shards(param), own.device)

    def _layout(self, index: int, group: dict[str, Any]) -> Layout:
        """The group's arenas: of parameters that have state or a gradient (or will have, in backward)."""
        layout = self._layouts.get(index)
        if layout is not None and layout.holds(group["params"], self._has_gradient):
            return layout
        members: dict[Kind, dict[int, Tensor]] = {}
        absent = []
        first = sum(len(g["params"]) for g in self.param_groups[:index])
        for number, p in enumerate(group["params"], first):
            # A parameter with hooks may get a gradient or a sum, which must not wait for its state to be made.
            if self.state.get(p) or self._has_gradient(p) or (self._steps_from_hooks and p.requires_grad):
                members.setdefault(self._kind(p, group), {})[number] = p
            else:
                absent.append(p)
        for arena in () if layout is None else layout.arenas:
            if arena.offloaded is not None:  # what has been stepped in backward
                arena.offloaded.finish()
        arenas: list[Arena] = []
        states: dict[
            Tensor, dict[str, Any]
        ] = {}  # nothing has changed where there is no room for one of them
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
        self._alone.clear()  # views of other arenas
        self._buckets.clear()
        layout = self._layouts[index] = Layout(arenas, absent)
        return layout

    def _parts(self, param: Tensor, group: dict[str, Any]) -> list[Part]:
        kind = self._kind(param, group)
        return parts(self._moments, kind.state, kind.remainder)

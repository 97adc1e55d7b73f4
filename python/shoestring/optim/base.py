"""The base class of the optimizers. It adapts Python's groups, DTensors and state dicts to the C++ core."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, starmap
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from typing_extensions import TypedDict

from shoestring.core.dtensors import is_dtensor
from shoestring.core.one_thread import one_thread
from shoestring.optim.gradients import GradientHooks
from shoestring.optim.offload import is_place
from shoestring.optim.sharded import Aliases, local, shard_gradients, shards, splits_of
from shoestring.optim.shown_state import ShownState
from shoestring.optim.state_dicts import SETTINGS, RanksTogether, StateDicts, numbered
from shoestring.optim.state_layout import Kind, Moment, Part

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The attribute of a parameter with the function that splits the steps of its optimizer over processes, if
# they are to be split.
SPLITS_STEPS = "_shoestring_splits_steps"


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


@dataclass
class Known:
    """The options and parameters of a group that the core has been told."""

    options: dict[str, object] = field(default_factory=dict)  # all options except lr
    lr: object = None
    params: list[int] = field(default_factory=list)  # the addresses of the C++ tensors
    members: list[Tensor] = field(default_factory=list)  # the parameters
    stepped: list[Tensor] = field(default_factory=list)  # the tensors that the core steps
    is_sharded: bool = False  # whether any parameter is a DTensor
    # The shapes of the parameters that add_param_group received, by the addresses of the C++ tensors.
    shapes: dict[int, torch.Size] = field(default_factory=dict)


# Options of torch.optim with the values by which they ask for nothing that an optimizer here lacks.
NOTHING: dict[str, tuple[bool | None, ...]] = {
    "foreach": (None, False),
    "fused": (None, False),
    "amsgrad": (False,),
    "capturable": (False,),
    "differentiable": (False,),
}


class LowMemoryOptimizer(StateDicts, GradientHooks):
    """The base class of the optimizers. It does everything except the update rule.

    A subclass names the C++ class of ``shoestring::optim`` that takes the steps. An option has the same name in
    the group and in the C++ options.
    """

    _core_class: ClassVar[str]
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
        unknown = {name: value for name, value in unknown.items() if value not in NOTHING.get(name, ())}
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
        self._make_core(max_grad_norm, step_in_backward, accumulate_dtype, offload)
        memory_options = dict(
            state_format=state_format,
            min_quantize_size=min_quantize_size,
            weight_rounding=weight_rounding,
            seed=seed,
            maximize=maximize,
        )
        super().__init__(params, defaults | memory_options)
        splits = {
            splits for p in self._all_params() if (splits := getattr(p, SPLITS_STEPS, None)) is not None
        }
        try:
            for splits_steps in splits:
                splits_steps(self)
            self._core.set_offload(offload)  # a process that steps a part reserves room for it alone
        except BaseException:
            self._retire()  # the traceback of the error may keep this object
            raise

    def _make_core(
        self,
        max_grad_norm: float | None,
        step_in_backward: bool,
        accumulate_dtype: torch.dtype,
        offload: str | None,
    ) -> None:
        """Make a C++ optimizer without groups. ``set_offload`` follows when it has groups."""
        self._core = torch.classes.shoestring.OptimizerCore(self._core_class, self._name)
        self._option_names: list[str] = self._core.option_names()
        self._known: list[Known] = []
        self._aliases = Aliases()
        # With found_inf, 1 if the last step was skipped and 0 otherwise, on the device.
        self._skipped: Tensor | None = None
        self._shown = 0  # the core's number of allocations when self.state was last filled
        self._shown_state = ShownState()
        self.offload = offload
        self._init_hooks()
        self.step_in_backward, self.max_grad_norm = step_in_backward, max_grad_norm
        self.accumulate_dtype = accumulate_dtype

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which a step clips the gradients; None clips nothing."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        self._core.set_max_grad_norm(None if norm is None else float(norm))
        self._max_grad_norm = norm

    @property
    def step_in_backward(self) -> bool:
        """Whether each parameter is stepped as soon as its gradient is complete."""
        return self._step_in_backward

    @step_in_backward.setter
    def step_in_backward(self, step_in_backward: bool) -> None:
        self._core.set_step_in_backward(step_in_backward)
        self._step_in_backward = step_in_backward

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of the gradient sums of ``accumulate()``."""
        return self._accumulate_dtype

    @accumulate_dtype.setter
    def accumulate_dtype(self, dtype: torch.dtype) -> None:
        self._core.set_accumulate_dtype(dtype)
        self._accumulate_dtype = dtype

    @property
    def grad_norm(self) -> Tensor | None:
        """With ``max_grad_norm``, the norm of the last step's gradients before clipping."""
        norm: Tensor | None = self._core.grad_norm()
        return norm

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that offloading takes, pinned if the parameters are on a GPU.

        With ``offload="cpu"`` this includes gradients and weights only, since the state is in pageable
        memory.
        """
        size: int = self._core.host_bytes()
        return size

    @property
    def _is_unfinished(self) -> bool:
        """Whether a step has failed and can be finished."""
        unfinished: bool = self._core.is_unfinished()
        return unfinished

    def _moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """Return the moments (running means) that the update rule keeps with the options of a group."""
        return tuple(starmap(Moment, self._core.moments(self._values(group))))

    def _extra(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of a parameter's fp32 state tensors that are not in flat tensors (arenas).

        Moments are not included. The shapes are those of the whole parameter, if it is a DTensor.
        """
        return {name: tuple(shape) for name, shape in self._core.extras(list(param.shape))}

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError if an option of a group is invalid. The C++ class of the optimizer checks them."""
        lr = group["lr"]
        is_number = lr.numel() == 1 if isinstance(lr, Tensor) else isinstance(lr, Real)
        self._expect(is_number and float(lr) >= 0, "lr", "a number of at least 0", lr)
        betas = group.get("betas", ())
        if isinstance(betas, (tuple, list)):
            tensors = sum(isinstance(beta, Tensor) for beta in betas)
            self._expect(tensors in (0, len(betas)), "betas", "either numbers or tensors", betas)
        self._core.check_options(self._values(group))

    @one_thread
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``.

        Its options are checked before anything changes.
        """
        group = {**self.defaults, **param_group}
        self._check_options(group)
        param_group["params"] = distinct(self._name, param_group["params"])
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
        super().add_param_group(param_group)
        try:
            self._add_to_core(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._watch(self.param_groups[-1]["params"])

    def _step(self) -> None:
        if self._is_retired:
            raise RuntimeError(
                f"{self._name}: step: expected an optimizer that was made after undo() of the report of parallelize, "
                "received one from before"
            )
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self._splits_gradients and (scale is not None or found_inf is not None):
            raise RuntimeError(
                f"{self._name}: step: expected neither a GradScaler nor a Guard of the optimizer with split gradients "
                "(ZeRO-2), received one of them, which finds no gradients to check; use ZeRO-1, or bf16 without a GradScaler"
            )
        if not isinstance(found_inf, Tensor):  # GradScaler's sum over no gradients is the number 0
            found_inf = None
        if self.step_in_backward:
            # Parameters may have been replaced since the hooks were registered.
            self._watch(self._all_params())
        if found_inf is not None and self.step_in_backward:
            raise RuntimeError(
                f"{self._name}: step: expected no GradScaler with step_in_backward=True, received one: weights are "
                "stepped before it knows whether all gradients are finite; use bf16, or step_in_backward=False"
            )
        if self._core.has_sums():
            self._check_sums(found_inf is not None and scale is None)
            if found_inf is None and scale is None:
                self._check_unchanged()
        self._last.clear()
        if scale is not None and found_inf is None:
            found_inf = torch.zeros_like(scale)
        self._synchronize()
        if not self.step_in_backward:  # else backward has done this
            self._take_changed_state()
        self._consolidated = None
        try:
            with self._shard_gradients():
                self._skipped = self._core.step(scale, found_inf)
        finally:
            self._show_state()

    def _check_sums(self, is_unscaled: bool) -> None:
        if is_unscaled:
            raise RuntimeError(
                f"{self._name}: step: expected scaled gradients, like the sums of accumulate(), "
                "received gradients after GradScaler.unscale_; to clip, use max_grad_norm, which unscales "
                "by itself"
            )
        if self._is_replicated:
            raise RuntimeError(
                f"{self._name}: step: expected a last micro-batch outside of accumulate() that has a gradient for "
                "every parameter, received sums that DistributedDataParallel has not reduced"
            )

    @_disable_dynamo
    @torch.no_grad()
    @one_thread
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in ``torch.optim.Optimizer``.

        If a step or a backward raised an error before it stepped any parameter, its remaining work is
        dropped, too. The gradient sums of ``accumulate()`` are dropped as well.
        """
        super().zero_grad(set_to_none)
        self._core.discard()

    @torch.no_grad()
    def _split(self, shard_core: Callable[[Any], None], all_ranks: RanksTogether, gradients: bool) -> None:
        """Split the steps over processes, and the gradients if ``gradients``; ``shard_core`` tells the core."""
        self._synchronize()
        shard_core(self._core)
        self._all_ranks, self._splits_gradients = all_ranks, gradients
        self._watch(self._all_params())

    # ---- what the core knows ---------------------------------------------------------------------------------

    def _values(self, group: dict[str, Any]) -> dict[str, object]:
        """Return the options of a group as the core takes them."""
        return {name: core_value(group[name]) for name in self._option_names}

    def _stepped(self, param: Tensor) -> Tensor:
        """Return the tensor that the core steps: the parameter, or an alias of this process's shard of it."""
        return self._aliases.stepped(param)

    def _add_to_core(self, group: dict[str, Any]) -> None:
        params = group["params"]
        known = Known(is_sharded=any(map(is_dtensor, params)), shapes={p._cdata: p.shape for p in params})
        with torch.no_grad():
            stepped = [self._stepped(p) for p in params] if known.is_sharded else params
            self._core.add_group(stepped, self._values(group), *splits_of(params))
        self._known.append(known)

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Tell the core which options and parameters of the groups have changed."""
        for index, (group, known) in enumerate(zip(self.param_groups, self._known, strict=True)):
            lr, options = group["lr"], self._values(group)
            value = options.pop("lr")  # may be a tensor, which is not compared
            if lr is not known.lr or options != known.options:
                self._core.set_options(index, {**options, "lr": value})
                known.lr, known.options = lr, options
            stepped = [self._stepped(p) for p in group["params"]] if known.is_sharded else group["params"]
            params = [p._cdata for p in stepped]
            if params != known.params:
                if not known.is_sharded and any(map(is_dtensor, stepped)):
                    self._take_dtensors()
                    return
                self._check_replaced(known.shapes, group["params"])
                self._core.replace_params(index, stepped)
                known.params = params
                self._shown_state.follow(self.state, known.members, group["params"])
                known.members = list(group["params"])
            known.stepped = stepped

    def _check_replaced(self, shapes: dict[int, torch.Size], params: list[Tensor]) -> None:
        """Raise RuntimeError if the optimizer cannot step ``params`` in place of those that it was made for."""

    def _take_dtensors(self) -> None:
        """Make the core anew for DTensors that have replaced the parameters before the first step.

        Accelerate replaces them when it shards a model that already has an optimizer.
        """
        if self._all_ranks is not None:
            raise RuntimeError(
                f"{self._name}: params: expected plain parameters after shard(), received DTensors in their place. Leave out "
                "shard(), since FSDP splits the state"
            )
        if any(self.state.values()):
            raise RuntimeError(
                f"{self._name}: params: expected DTensors before the optimizer has state, received them after. Shard the "
                "model first, then load the state"
            )
        for hook in self._hooks:
            hook.remove()
        self._make_core(**{name: getattr(self, name) for name in SETTINGS})
        for group in self.param_groups:
            self._add_to_core(group)
            self._watch(group["params"])
        self._core.set_offload(self.offload)
        self._synchronize()

    def _shard_gradients(self) -> AbstractContextManager[None]:
        """Give the aliases of DTensor parameters the gradients of their shards."""
        if not any(known.is_sharded for known in self._known):
            return nullcontext()
        groups = zip(self.param_groups, self._known, strict=True)
        sharded = (
            zip(group["params"], known.stepped, strict=True) for group, known in groups if known.is_sharded
        )
        return shard_gradients(chain.from_iterable(sharded))

    def _show_state(self) -> None:
        """Fill ``self.state`` with the tensors that the core has allocated since the last call."""
        made = self._core.layouts_made()
        if made == self._shown:
            return
        held = {}
        for index, group in enumerate(self.param_groups):
            for p, entries in zip(group["params"], self._core.states(index), strict=True):
                if entries:
                    self.state[p], held[p] = entries, dict(entries)
        self._shown_state.held = held
        self._shown_state.note(self.state)
        self._shown = made

    def _take_changed_state(self) -> None:
        """Give the core the state, if the user has deleted, replaced or added entries of it."""
        shown = self._shown_state
        if shown.is_shown(self.state):
            return
        if shown.is_held(self.state, self.param_groups):  # only other code has added entries
            shown.note(self.state)
            return
        if self._all_ranks is not None or self._core.has_sums() or self._is_unfinished:
            raise RuntimeError(
                f"{self._name}: state: expected the entries of the last step, received others. Change them after "
                "a whole step, before the first micro-batch of the next one, and not after shard()"
            )
        every: list[list[dict[str, Any]]] = []
        for group in self.param_groups:
            every.append([])
            for p in group["params"]:
                entries = numbered(self.state.get(p, {}))
                if shown.is_unchanged(p, entries):
                    entries = shown.held.get(p, {})
                elif entries:
                    self._check_entry(p, entries, group, "state")
                    shown.check_codes(self._name, p, entries)
                every[-1].append(entries)
        self._core.load(every, self._core.grad_norm())
        self._shown = -1
        self._show_state()

    def _kind(self, param: Tensor, group: dict[str, Any]) -> Kind:
        shard = local(param)
        device = torch.device("cpu") if self.offload == "cpu" else shard.device
        state = group["state_format"] if param.numel() >= group["min_quantize_size"] else "fp32"
        remainder = group["weight_rounding"] == "remainder" and shard.dtype == torch.bfloat16
        return Kind(state, remainder, device, shards(param))

    def _parts(self, param: Tensor, group: dict[str, Any]) -> list[Part]:
        kind = self._kind(param, group)
        parts = self._core.parts(self._values(group), kind.state, kind.remainder)
        return [Part(name, like.dtype, like.numel(), shaped) for name, like, shaped in parts]


def distinct(name: str, group_params: Tensor | Iterable[Any]) -> list[Any]:
    """Return a group's parameters without repetitions, of which the optimizer ``name`` warns like PyTorch."""
    if isinstance(group_params, (set, frozenset)):
        raise TypeError(
            f"{name}: params: expected a list, received a set, whose order differs between runs, so that the state "
            "of a parameter could be loaded for another one"
        )
    params = [group_params] if isinstance(group_params, Tensor) else list(group_params)
    unique: dict[int, Any] = {}
    for item in params:
        unique.setdefault(id(item[1] if isinstance(item, tuple) else item), item)
    if len(unique) < len(params):
        warnings.warn(
            f"{name}: params: expected each parameter once, received a parameter group with duplicate "
            "parameters; each is stepped once",
            stacklevel=3,
        )
    return list(unique.values())


def core_value(value: object) -> object:
    """Convert the value of an option to a type of the core: a tensor, None, bool, str, int, float or list.

    Other values become text, which the core refuses for every option that is not a text.
    """
    # float comes first because each step converts the options, and a test of Real takes seven times as long.
    if type(value) in (float, int) or value is None or isinstance(value, (Tensor, bool, str)):
        return value
    if isinstance(value, (tuple, list)) and all(
        isinstance(item, (float, Real, Tensor, type(None))) for item in value
    ):
        return [None if item is None else float(item) for item in value]
    if not isinstance(value, Real):
        return repr(value)
    return int(value) if isinstance(value, Integral) else float(value)

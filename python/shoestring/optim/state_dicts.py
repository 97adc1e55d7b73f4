"""State dicts of the optimizers: saving, loading, copying and pickling."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shoestring.core.one_thread import one_thread
from shoestring.files.safetensors_file import Gathered
from shoestring.optim.convert import imported
from shoestring.optim.parameter_names import by_names
from shoestring.optim.sharded import local
from shoestring.optim.sharded_state import owned_entries, save_dtensors
from shoestring.optim.shown_state import ShownState
from shoestring.optim.state_layout import Kind, Moment, Part
from shoestring.optim.steps import Steps

FORMAT_VERSION = 1
# Settings of an optimizer that copies and pickles hold, beside state and groups.
SETTINGS = ("max_grad_norm", "step_in_backward", "accumulate_dtype", "offload")
# How to save the state that processes have split. It ends errors.
REMEDY = (
    "Call it on all ranks, or call consolidate_state_dict() on all ranks before. With the Trainer of transformers, pass "
    "callbacks=[shoestring.callbacks.transformers_callback()]"
)


def numbered(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state whose number of steps is a tensor, as some tools save it as a number."""
    step = entry.get("step")
    is_number = isinstance(step, Real) and not isinstance(step, bool)
    return {**entry, "step": torch.tensor(float(step))} if is_number else entry  # type: ignore[arg-type]


class AsSaved:
    """Wrap a tensor so that Optimizer.load_state_dict does not cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class RanksTogether(Protocol):
    """Waits until all ranks call a function, as ``shoestring.distributed.all_ranks.AllRanks`` does."""

    rank: int

    def wait(self, what: str, remedy: str) -> None: ...


class StateDicts(Steps):
    """Mixin of the optimizers. It saves and loads the optimizer state."""

    # This mixin uses the following attributes and methods of the optimizer.
    offload: str | None
    step_in_backward: bool
    max_grad_norm: float | None
    accumulate_dtype: torch.dtype
    _moments: Callable[[dict[str, Any]], tuple[Moment, ...]]
    _core: Any
    _all_ranks: RanksTogether | None  # the processes that have split the state
    # The rank with the state that consolidate_state_dict has gathered, and that state; it is empty on other ranks.
    _consolidated: tuple[int, dict[Any, Any]] | None
    _known: list[Any]
    _shown: int
    _shown_state: ShownState
    _kind: Callable[[Tensor, dict[str, Any]], Kind]
    _parts: Callable[[Tensor, dict[str, Any]], list[Part]]
    _extra: Callable[[Tensor], dict[str, tuple[int, ...]]]
    _check_options: Callable[[dict[str, Any]], None]
    _make_core: Callable[..., None]
    _add_to_core: Callable[[dict[str, Any]], None]
    _synchronize: Callable[[], None]
    _show_state: Callable[[], None]
    _watch: Callable[..., None]

    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict as in ``torch.optim.Optimizer``.

        It also holds ``format_version``, the version of the state's format. If processes have split the state
        (``shoestring.distributed.shard``), all of them must call it, or have called ``consolidate_state_dict``
        since the last step. The state is that of one process.

        Raises:
            RuntimeError: processes have split the state, and not all of them call. The error comes 120 s after
                the call of rank 0.
        """
        self._core.settle()
        self._show_state()
        extra: dict[str, Any] = {"format_version": FORMAT_VERSION}
        norm = self._core.grad_norm()
        if self.step_in_backward and norm is not None:
            extra["grad_norm"] = norm
        # This hook of state_dict runs before the hooks that the user registered.
        first = self.register_state_dict_post_hook(lambda _, saved: save_dtensors(self, saved), prepend=True)
        try:
            with self._whole_state():
                return {**super().state_dict(), **extra}
        finally:
            first.remove()

    @_disable_dynamo
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state that processes have split on one rank, for a ``state_dict()`` on that rank alone.

        All ranks must call it. The state is kept until the next step or load. The method has the name and the
        meaning of that of ``torch.distributed.optim.ZeroRedundancyOptimizer``, so Lightning calls it by itself.
        It does nothing if the state is not split.

        Args:
            to: the rank, in the process group of ``shoestring.distributed.shard``.

        Raises:
            RuntimeError: not all ranks call it.
        """
        if self._all_ranks is None:
            return
        whole = self._gathered_state("consolidate_state_dict", is_kept=self._all_ranks.rank == to)
        self._consolidated = to, whole

    @_disable_dynamo
    @one_thread
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit for parameters of any dtype. All tensors are copied.

        The group options of the state dict replace those of this optimizer, as in ``torch.optim``. This includes
        ``state_format``: an 8-bit state stays 8-bit in an optimizer that was made with ``state_format="4bit"``.

        A state dict without ``format_version`` may also come from the optimizer of the same update rule in
        ``torch.optim`` or in bitsandbytes. The moments may have any floating dtype, or be 8-bit codes of
        bitsandbytes in blocks of 256. The moments are converted to the format of this optimizer's option
        ``state_format``. 8-bit codes are kept if bitsandbytes' quantisation map equals ours; otherwise the values
        are quantised again. bitsandbytes may have rounded a second moment to zero although the first moment
        of the element is not zero. Such a second moment gets the smallest code above zero. Options that are
        not in the state dict keep their values.

        If the parameters have names, here and in the state dict (``AdamW(model.named_parameters())``), they may have
        another order within their group: the state of each is found by its name. The bits of stochastic rounding depend
        on the order.

        Raises:
            ValueError: the state dict does not fit. Nothing has changed then.
        """
        where = f"{self._name}: load_state_dict"
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"{where}: expected an optimizer's state dict, received no {key!r}")
        version = state_dict.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(f"{where}: expected format_version {FORMAT_VERSION}, received {version!r}")
        norm = state_dict.get("grad_norm")
        if norm is not None and not (
            isinstance(norm, Tensor) and norm.numel() == 1 and norm.is_floating_point()
        ):
            received = tuple(norm.shape) if isinstance(norm, Tensor) else repr(norm)
            raise ValueError(f"{where}: grad_norm: expected a tensor of one number, received {received}")

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            loaded = by_names(self, loaded)
            if "format_version" not in loaded:
                loaded = imported(self, loaded)
            entries = {
                key: {k: AsSaved(v) if isinstance(v, Tensor) else v for k, v in numbered(entry).items()}
                for key, entry in owned_entries(self, loaded).items()
            }
            return {**loaded, "state": entries}

        # This load_state_dict hook runs after the user's hooks.
        last = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        if self.step_in_backward and norm is not None:
            self._core.set_grad_norm(norm.detach().to(torch.float32).reshape(()).clone())

    @contextmanager
    def _whole_state(self) -> Iterator[None]:
        """Within this context, ``state`` is that of one process. All processes that split it must enter it.

        After ``consolidate_state_dict``, its rank enters it alone.
        """
        if self._all_ranks is None:
            yield
            return
        if self._consolidated is not None:
            to, whole = self._consolidated
            if to != self._all_ranks.rank:
                raise RuntimeError(
                    f"{self._name}: state_dict: expected rank {to}, which has the state since consolidate_state_dict(), "
                    f"received rank {self._all_ranks.rank}"
                )
        else:
            whole = self._gathered_state("state_dict", is_kept=True)
        local_state, self.state = self.state, defaultdict(dict, whole)
        try:
            yield
        finally:
            self.state = local_state

    def _gathered_state(self, what: str, *, is_kept: bool) -> dict[Any, Any]:
        """Return the state that one process would have if ``is_kept``. All processes that split it must call this."""
        whole: dict[Any, Any] = {}
        for name, part in self._split_state(what).items():
            tensor = part.whole()
            if is_kept:
                group, index, entry = name.split(".", 2)
                param = self.param_groups[int(group)]["params"][int(index)]
                whole.setdefault(param, {})[entry] = tensor
        return whole

    def _split_state(self, what: str) -> dict[str, Gathered]:
        """Return the state that ``shard`` has split, by its names in a file.

        All processes must call it, and then for each tensor, in the same order, ``whole``.
        """
        assert self._all_ranks is not None
        self._all_ranks.wait(f"{self._name}: {what}", REMEDY)
        state = self._core.split_state()
        named = zip(state.names(), state.likes(), strict=True)
        return {name: Gathered(like, partial(state.whole, i)) for i, (name, like) in enumerate(named)}

    def _copy_of_part(self) -> Callable[[], None]:
        """Copy the options and this process's part of the state to host memory; return what restores them."""
        self._synchronize()
        groups = [{name: value for name, value in g.items() if name != "params"} for g in self.param_groups]
        groups = tree_map_only(Tensor, Tensor.clone, groups)
        copied = self._core.copy_state()

        def restore() -> None:
            for group, values in zip(
                self.param_groups, tree_map_only(Tensor, Tensor.clone, groups), strict=True
            ):
                group.update(values)
            copied.restore()
            self._consolidated = None
            self._show_state()

        return restore

    def __getstate__(self) -> dict[str, Any]:
        if self._all_ranks is not None:
            raise RuntimeError(
                f"{self._name}: expected an optimizer whose state is in this process, to copy or pickle it, received one "
                "whose state processes have split; use state_dict()"
            )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in SETTINGS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check the state from a load, a copy or an unpickling, then copy it into new flat state tensors."""
        settings = {name: state.pop(name) for name in SETTINGS if name in state}
        if settings:  # a copy or an unpickling, unlike load_state_dict, has no core and no hooks yet
            self._make_core(**settings)
        if "state" in state:
            for group in state["param_groups"]:
                for name, default in state.get("defaults", self.__dict__.get("defaults", {})).items():
                    group.setdefault(name, default)
                self._check_options(group)
            for param, entry in state["state"].items():
                for name, value in entry.items():
                    entry[name] = value.tensor if isinstance(value, AsSaved) else value
                group = next((g for g in state["param_groups"] if any(p is param for p in g["params"])), None)
                if group is not None and entry:
                    self._check_entry(param, entry, group)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # PyTorch adds it; no option here has this name
        if settings:
            for group in self.param_groups:
                self._add_to_core(group)
                self._watch(group["params"])
            self._core.set_offload(self.offload)
        self._synchronize()
        self._shown_state = ShownState()  # drops the former state, whose memory the new may need
        entries = [[self.state.get(p, {}) for p in group["params"]] for group in self.param_groups]
        self._core.load(entries, None)
        self._consolidated = None
        if self._all_ranks is not None:  # the core has copied the part of this process
            self.state.clear()
        self._shown = -1
        self._show_state()

    def _elementwise(self, param: Tensor) -> set[str]:
        """Return the names in ``_extra`` of tensors with an element for each one of the parameter.

        Processes that split the parameter split these tensors, too. Each process has the others in full.
        """
        if param.ndim > 1:
            return set()
        return {name for name, shape in self._extra(param).items() if shape == tuple(param.shape)}

    def _check_entry(
        self, param: Tensor, entry: dict[str, Any], group: dict[str, Any], what: str = "load_state_dict"
    ) -> None:
        kind, shard = self._kind(param, group), local(param)
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"step": (torch.float32, ())}
        expected |= {p.name: (p.dtype, p.shape(shard)) for p in self._parts(param, group)}
        elementwise = self._elementwise(param)
        for name, shape in self._extra(param).items():
            expected[name] = torch.float32, tuple(shard.shape) if name in elementwise else shape
        where = f"{self._name}: {what}"
        if entry.keys() != expected.keys():
            raise ValueError(
                f'{where}: state_format="{kind.state}" expects the entries {sorted(expected)}, received {sorted(entry)}'
            )
        for name, (dtype, shape) in expected.items():
            value = entry[name]
            if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != torch.Size(shape):
                received = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{where}: {name}: expected {dtype} {shape}, received {received}")

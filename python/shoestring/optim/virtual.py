"""Virtual parameters: small stand-ins for matrices that a base optimizer steps for GaLore and APOLLO."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shoestring.core.dtensors import is_dtensor
from shoestring.optim.base import DTYPES, core_value
from shoestring.optim.sharded import Aliases, as_dtensor, shard_gradients, splits_of


class LowRankMethod(NamedTuple):
    """The constants by which GaLore and APOLLO differ.

    core_class: the name of the method in C++.
    kind: the name of an option of the groups that only this method has, and its values for messages.
    kept: the name of the tensor that a step stores for each projected parameter.
    fixed: options of the base optimizer that have fixed values for virtual parameters.
    """

    core_class: str
    kind: tuple[str, str]
    kept: str
    fixed: dict[str, Any]


class VirtualParameters:
    """The base optimizer of GaLore or APOLLO, and its virtual parameters: fp32 stand-ins for matrices.

    A virtual parameter is zero before a step, and its gradient is the projected gradient. The value that the
    base optimizer leaves in it is the low-rank update. This works with any update rule and any state format.
    Between steps, no memory is allocated for virtual parameters. The C++ class ``LowRankCore`` makes the
    virtual parameters, projects gradients and applies updates. For each group of the outer optimizer (GaLore
    or APOLLO), the base optimizer has two groups: the parameters without projection, and the virtual
    parameters.
    """

    def __init__(
        self, method: LowRankMethod, name: str, base: type[Optimizer], options: dict[str, Any]
    ) -> None:
        """``name`` is the name of the outer optimizer in errors."""
        self.core = torch.classes.shoestring.LowRankCore(method.core_class, name)
        # The constructor of the base optimizer checks the options, so construct one now.
        self.defaults = base([Parameter(torch.zeros(1))], **options).defaults
        # Options of the base optimizer that have fixed values for virtual parameters, whatever the options of
        # the group.
        self.fixed = {name: value for name, value in method.fixed.items() if name in self.defaults}
        self.of: dict[Tensor, Tensor] = {}
        self._aliases = Aliases()
        self._core_entries: dict[Tensor, dict[str, Any]] = {}  # of projected parameters, after a step
        self._stepped: list[list[Tensor]] = []  # for each group, the tensors that C++ steps
        # For each group, its projected parameters, each with an empty tensor that has the dtype and the shape
        # of the tensor that a step stores for it.
        self.projected: list[list[tuple[Tensor, Tensor]]] = []
        self._method, self._name, self._class, self._options = method, name, base, options
        self._base: Optimizer | None = None

    @property
    def base(self) -> Optimizer:
        assert self._base is not None, "add comes first"
        return self._base

    def _both(self, group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {name: group[name] for name in self.defaults}
        return options, options | self.fixed

    def add(self, group: dict[str, Any]) -> None:
        """Add a parameter group."""
        params = group["params"]
        stepped = [self._aliases.stepped(p) for p in params]
        lows = self.core.add_group(stepped, self._values(group), *splits_of(params))
        virtual = {p: low for p, low in zip(params, lows, strict=True) if low is not None}
        try:
            for i, p in enumerate(params):
                if p in virtual and p.dtype not in DTYPES:
                    raise ValueError(
                        f"{self._name}: params[{i}]: expected fp32, bf16 or fp16, received {p.dtype}"
                    )
            members = ([p for p in params if p not in virtual], list(virtual.values()))
            groups = [
                {**options, "params": each} for options, each in zip(self._both(group), members, strict=True)
            ]
            if self._base is None:
                self._base = self._class(groups, **self._options)
            else:
                for new in groups:
                    self._base.add_param_group(new)
        except BaseException:
            self.core.pop_group()
            raise
        self._stepped.append(stepped)
        self.projected.append(list(zip(virtual, self.core.kept_like(len(self.projected)), strict=True)))
        self.of |= virtual

    def update_options(self, groups: list[dict[str, Any]]) -> None:
        """Copy options of the outer optimizer's groups to the base optimizer.

        Learning rate schedulers may have changed the options.
        """
        for i, group in enumerate(groups):
            for ours, options in zip(
                self.base.param_groups[2 * i : 2 * i + 2], self._both(group), strict=True
            ):
                ours.update(options)

    def _values(self, group: dict[str, Any]) -> dict[str, object]:
        """Return the options of a group that the core reads."""
        names = ("rank", "update_proj_gap", "scale", self._method.kind[0], "seed", "lr")
        values = {name: core_value(group[name]) for name in names}
        decay, maximize = group.get("weight_decay") or 0.0, bool(group.get("maximize"))
        return {**values, "weight_decay": core_value(decay), "maximize": maximize}

    def step(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]], max_grad_norm: float | None
    ) -> Tensor | None:
        """Step the parameters of the outer optimizer that have a gradient, and update its ``state``.

        Return the norm of all gradients, or None without ``max_grad_norm``.
        """
        self.update_options(groups)
        self._take_changed_state(state)
        entries = [
            [self._core_entry(p, state.get(p, {}), group["update_proj_gap"]) for p, _ in each]
            for each, group in zip(self.projected, groups, strict=True)
        ]
        pairs = self._pairs(groups)
        norm: Tensor | None
        with shard_gradients(pairs):
            try:
                norm = self.core.begin([self._values(group) for group in groups], entries, max_grad_norm)
                with self._clipped(pairs) if max_grad_norm is not None else nullcontext():
                    self.base.step()
                self.core.finish()
            finally:
                self.core.release()
        for each, new in zip(self.projected, self.core.states(), strict=True):
            for (p, _), entry in zip(each, new, strict=True):
                if entry:
                    state[p].update(entry)
                    self._core_entries[p] = entry
        self.show(state, groups)
        return norm

    def _core_entry(self, param: Tensor, entry: dict[str, Any], gap: int) -> dict[str, Any]:
        """Return the core's entries of a projected parameter. If the user deleted them, project anew."""
        names = (self._method.kept, "projection_age", "seed")
        core_entry = {name: entry[name] for name in names if name in entry}
        if not core_entry and param in self._core_entries:
            return {**self._core_entries[param], "projection_age": gap}
        return core_entry

    def _take_changed_state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Let the base optimizer have the entries that the user has deleted or replaced in ``state``."""
        owners = {virtual: p for p, virtual in self.of.items()}
        for param, entry in list(self.base.state.items()):
            shown = state.get(owners.get(param, param), {})
            if any(shown.get(name) is not value for name, value in entry.items()):
                remaining = {name: shown[name] for name in entry if name in shown}
                self.base.state.pop(param)
                if remaining:
                    self.base.state[param] = remaining

    def _pairs(self, groups: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with the tensor that C++ steps; tell C++ which tensors have been replaced."""
        for index, group in enumerate(groups):
            stepped = [self._aliases.stepped(p) for p in group["params"]]
            if any(a is not b for a, b in zip(stepped, self._stepped[index], strict=True)):
                self.core.replace_params(index, stepped)
                self._stepped[index] = stepped
        both = zip(groups, self._stepped, strict=True)
        return [pair for group, stepped in both for pair in zip(group["params"], stepped)]

    @contextmanager
    def _clipped(self, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let the base optimizer see the clipped gradients of DTensors that are not projected."""
        former = []
        for p, stepped in pairs:
            if is_dtensor(p) and p not in self.of and stepped.grad is not None:
                former.append((p, p.grad))
                p.grad = as_dtensor(stepped.grad, p, tuple(p.shape))
        try:
            yield
        finally:
            for p, grad in former:
                p.grad = grad

    def show(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Make the outer optimizer's state refer to the base optimizer's tensors.

        A step, or loading a state dict, may have replaced these tensors.
        """
        for group in groups:
            for p in group["params"]:
                entry = self.base.state.get(self.of.get(p, p))
                if entry:
                    state[p].update(entry)

    def beside(self) -> dict[str, Any]:
        """Return the base optimizer's state dict without ``state`` and ``param_groups``."""
        return {k: v for k, v in self.base.state_dict().items() if k not in ("state", "param_groups")}

    def with_base(
        self,
        state: dict[int, dict[str, Any]],
        groups: list[dict[str, Any]],
        saved_groups: list[dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """Return a state dict's ``state`` with the entries of the base optimizer's state dict added.

        The entries of DTensors that are not projected are DTensors.
        """
        base = self.base.state_dict()
        index_of = {
            p: index
            for group, saved in zip(self.base.param_groups, base["param_groups"], strict=True)
            for p, index in zip(group["params"], saved["params"], strict=True)
        }
        merged = dict(state)
        for group, saved in zip(groups, saved_groups, strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                entry = base["state"].get(index_of[self.of.get(p, p)])
                if entry:
                    merged[key] = {**merged.get(key, {}), **entry}
        return merged

    def load(self, entries: dict[Tensor, dict[str, Any]], beside: dict[str, Any]) -> None:
        """Load the base optimizer's state.

        The keys of ``entries`` are the outer optimizer's parameters, and its values their state. The argument
        ``beside`` is the result of the method ``beside()``.
        """
        saved = self.base.state_dict()
        owners = {virtual: p for p, virtual in self.of.items()}
        by_index = {}
        for group, indices in zip(self.base.param_groups, saved["param_groups"], strict=True):
            for member, index in zip(group["params"], indices["params"], strict=True):
                entry = entries.get(owners.get(member, member))
                if entry:
                    by_index[index] = entry
        self.base.load_state_dict({**saved, **beside, "state": by_index})

"""Virtual parameters: small stand-ins for matrices that a base optimizer steps for GaLore and APOLLO."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shoestring.optim.base import DTYPES, core_value


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
        self.defaults = base(
            [Parameter(torch.zeros(1))], **options
        ).defaults  # construct a base optimizer now, because the constructor checks the options
        # Options of the base optimizer that have fixed values for virtual parameters, whatever the options of
        # the group.
        self.fixed = {name: value for name, value in method.fixed.items() if name in self.defaults}
        self.of: dict[Tensor, Tensor] = {}
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
        lows = self.core.add_group(params, self._values(group))
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
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        max_grad_norm: float | None,
    ) -> Tensor | None:
        """Step the parameters of the outer optimizer that have a gradient, and update its ``state``.

        Return the norm of all gradients, or None without ``max_grad_norm``.
        """
        self.update_options(groups)
        own = (self._method.kept, "projection_age", "seed")
        entries = [
            [{name: state[p][name] for name in own if name in state.get(p, ())} for p, _ in each]
            for each in self.projected
        ]
        norm: Tensor | None
        try:
            norm = self.core.begin([self._values(group) for group in groups], entries, max_grad_norm)
            self.base.step()
            self.core.finish()
        finally:
            self.core.release()
        for each, new in zip(self.projected, self.core.states(), strict=True):
            for (p, _), entry in zip(each, new, strict=True):
                if entry:
                    state[p].update(entry)
        self.show(state, groups)
        return norm

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

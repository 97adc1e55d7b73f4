"""Virtual parameters: small stand-ins for matrices that a base optimizer steps for GaLore and APOLLO."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class VirtualParameters:
    """The base optimizer of GaLore or APOLLO, and its virtual parameters: fp32 stand-ins for matrices.

    A virtual parameter is zero before a step, and its gradient is the projected gradient. The value that the
    base optimizer leaves in it is the low-rank update. This works with any update rule and any state format.
    Between steps, no memory is allocated for virtual parameters. For each group of the outer optimizer
    (GaLore or APOLLO), the base optimizer has two groups: the parameters without projection, and the virtual
    parameters.
    """

    def __init__(self, base: type[Optimizer], options: dict[str, Any], fixed: dict[str, Any]) -> None:
        self.defaults = base(
            [Parameter(torch.zeros(1))], **options
        ).defaults  # construct a base optimizer now, because the constructor checks the options
        # Options of the base optimizer that have fixed values for virtual parameters, whatever the options of
        # the group.
        self.fixed = {name: value for name, value in fixed.items() if name in self.defaults}
        self.of: dict[Tensor, Parameter] = {}
        self._class, self._options = base, options
        self._base: Optimizer | None = None

    @property
    def base(self) -> Optimizer:
        assert self._base is not None, "add comes first"
        return self._base

    def _both(self, group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {name: group[name] for name in self.defaults}
        return options, options | self.fixed

    def add(self, group: dict[str, Any], shapes: list[tuple[int, int] | None]) -> None:
        """Add a parameter group. A parameter whose entry in ``shapes`` is None has no virtual parameter."""
        plain = [p for p, shape in zip(group["params"], shapes, strict=True) if shape is None]
        virtual = {}
        for p, shape in zip(group["params"], shapes, strict=True):
            if shape is not None:
                virtual[p] = Parameter(torch.empty(shape, dtype=torch.float32, device=p.device))
                virtual[p].untyped_storage().resize_(0)
        members = (plain, list(virtual.values()))
        groups = [
            {**options, "params": params} for options, params in zip(self._both(group), members, strict=True)
        ]
        if self._base is None:
            self._base = self._class(groups, **self._options)
        else:
            for new in groups:
                self._base.add_param_group(new)
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

    def provide(self, param: Tensor, grad: Tensor) -> None:
        """Allocate a virtual parameter, zero it, and set its gradient."""
        virtual = self.of[param]
        virtual.untyped_storage().resize_(virtual.numel() * virtual.element_size())
        virtual.zero_()
        virtual.grad = grad

    def release(self) -> None:
        """Free the memory and the gradients of all virtual parameters."""
        for virtual in self.of.values():
            virtual.grad = None
            virtual.untyped_storage().resize_(0)

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

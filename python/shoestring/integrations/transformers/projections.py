"""Compute linear layers of transformers models by fused operators.

- The query, key and value projections become one operator, with adapters or without.
- SwiGLU MLPs with an adapter save neither silu(gate) nor silu(gate) * up for backward.
- Dense layers, trainable or frozen, become the operators ``linear`` and ``linear_group``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.together import adapted_swiglu, together
from shoestring.core.instances import Found, Left, derive
from shoestring.core.presence import weights_present
from shoestring.gemm.dense import is_plain
from shoestring.integrations.transformers.layers import MLP, is_bare_mlp
from shoestring.integrations.transformers.products import Products
from shoestring.layers.swiglu import swiglu

# Attribute of a changed module: while its forward runs, a dict of computed outputs that have not been used
# yet; else None.
OUTPUTS = "_shoestring_projections"
ATTENTION = ("q_proj", "k_proj", "v_proj")
# Names of linear layers that read the same input, if one module has all of them.
GROUPS: tuple[tuple[str, ...], ...] = (ATTENTION, ("gate_proj", "up_proj"), ("query", "key", "value"))
# Containers that do not look up their submodules by name, so that a property cannot replace them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def fuse(
    model: nn.Module, *, adapters: bool = True, products: Products | None = None, head: str | None = None
) -> tuple[list[Found], list[Left]]:
    """Fuse the projections of attention modules, Llama-style MLPs, and the linear layers of all modules.

    A module with the submodules of a Llama-style MLP that computes something else on random tokens is left
    unchanged.

    Args:
        model: the model. Its direct linear layers, such as the output layer, are left unchanged.
        adapters: whether to fuse projections and MLPs that have adapters, or frozen or quantised weights.
        products: the choice of products for dense layers. None leaves these layers unchanged.
        head: path of the output layer if the loss computes it.

    Returns:
        The changes, and the layers that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    as_written: dict[type, bool] = {}
    output = None if head is None else model.get_submodule(head)
    for name, module in list(model.named_modules()):
        groups: list[tuple[str, ...]] = []
        if products is not None and module is not model:
            groups, reasons = _dense_groups(module, products, output)
            left += [(f"{name}.{child}".rstrip("."), reason) for child, reason in reasons]
        if "forward" in module.__dict__:  # another library has replaced the forward of this module
            continue
        forward, what = type(module).forward, []
        if adapters and _has_linears(module, ATTENTION):
            what.append("query, key and value together")
        elif (
            adapters
            and _has_linears(module, MLP)
            and is_bare_mlp(module)
            and as_written.setdefault(type(module), _is_swiglu(module))
        ):
            forward = _mlp(forward)
            what.append("SwiGLU without its products in memory")
        if groups:
            what.append("linear layers " + ", ".join("/".join(group) for group in groups))
        if not what:
            continue
        if adapters and _has_linears(module, ATTENTION):
            groups = [ATTENTION, *(group for group in groups if group[0] not in ATTENTION)]
        body = {"forward": _with_members(forward) if groups else forward, OUTPUTS: None}
        for group in groups:
            body |= {child: _member(child, group, adapters, products) for child in group}
        changes.append((name, "; ".join(what), derive(module, body, (OUTPUTS,))))
    return changes, left


def _has_linears(module: nn.Module, names: Sequence[str]) -> bool:
    return all(isinstance(module._modules.get(name), nn.Linear) for name in names)


def _dense_groups(
    module: nn.Module, products: Products, output: nn.Module | None
) -> tuple[list[tuple[str, ...]], list[Left]]:
    """Return the names of a module's dense layers that use our products, grouped by input.

    Also return the dense layers that are left unchanged, with the reason. An empty name stands for the
    module itself.
    """
    plain: dict[str, nn.Module] = {}
    left: list[Left] = []
    for name, layer in module._modules.items():
        if not isinstance(layer, nn.Linear) or layer is output or type(layer.weight) is not nn.Parameter:
            continue
        # Frozen layers of other classes, and those within PEFT's layers, have operators of their own.
        if not layer.weight.requires_grad and (type(layer) is not nn.Linear or name == "base_layer"):
            continue
        if "forward" in module.__dict__:
            return [], [("", "a forward of its own, another library's")]
        if isinstance(module, CONTAINERS):
            left.append((name, f"in a {type(module).__name__}, which does not look up its layers by name"))
        elif type(layer) is not nn.Linear:
            left.append((name, "a subclass of nn.Linear"))
        elif not is_plain(layer):
            left.append((name, "hooks, or a forward of its own"))
        else:
            plain[name] = layer
    groups = [group for group in GROUPS if all(name in plain for name in group)]
    groups += [(name,) for name in plain if not any(name in group for group in groups)]
    chosen = []
    for group in groups:
        if products.add([plain[name] for name in group]):
            chosen.append(group)
        elif products.measures:
            left.append(("/".join(group), "PyTorch's products are faster on this CPU"))
    return chosen, left


def _mlp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        y = adapted_swiglu(x, *(self._modules[name] for name in MLP))
        result: Tensor = original(self, x) if y is None else y
        return result

    return forward


def _is_swiglu(module: Any) -> bool:
    """Return whether the module computes a SwiGLU MLP, tested on random tokens.

    The tokens are large enough to distinguish silu from other activations.
    """
    weight = module.gate_proj.weight
    tokens = torch.randn(8, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    training = module.training
    module.eval()
    try:
        with weights_present(module), torch.no_grad():
            x = tokens.to(weight.device, weight.dtype)
            x = x * (2 / module.gate_proj(x).float().std()).to(x.dtype)
            expected, fused = module(x), module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
        return bool((fused - expected).norm() <= 0.02 * expected.norm())
    except Exception:  # raised if the module's forward has another signature
        return False
    finally:
        module.train(training)


class Member:
    """An object that replaces a linear layer while the forward of its module runs.

    The first layer of a group that is called computes the outputs of the whole group.
    """

    def __init__(
        self, module: Any, name: str, group: tuple[str, ...], adapters: bool, products: Products | None
    ) -> None:
        self.module = module
        self.name = name
        self.group = group
        self.adapters = adapters
        self.products = products

    def __call__(self, x: Tensor) -> Tensor:
        module, state = self.module, getattr(self.module, OUTPUTS)
        if state.get("x") is not x or self.name not in state:
            outputs = self._outputs(x)
            if outputs is None:
                alone: Tensor = module._modules[self.name](x)
                return alone
            state.clear()
            state.update(zip(self.group, outputs, strict=True), x=x)
        result: Tensor = state.pop(self.name)
        return result

    def _outputs(self, x: Tensor) -> list[Tensor] | None:
        """Compute all layers of the group together; return None if neither adapters nor products can."""
        layers = [self.module._modules[name] for name in self.group]
        outputs = together(layers, x) if self.adapters and len(layers) > 1 else None
        if outputs is None and self.products is not None:
            outputs = self.products.together(layers, x)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module._modules[self.name], name)


def _with_members(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward during which linear layers of the module are ``Member`` objects."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, OUTPUTS, {})
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self, OUTPUTS, None)

    return forward


def _member(name: str, group: tuple[str, ...], adapters: bool, products: Products | None) -> property:
    """Return a property for a layer of a group, which computes the whole group in a patched forward."""
    return property(
        lambda self: (
            self._modules[name]
            if getattr(self, OUTPUTS) is None
            else Member(self, name, group, adapters, products)
        )
    )

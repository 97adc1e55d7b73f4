"""Compute the query, key and value projections by one operator, and SwiGLU MLPs by one that saves less.

The operator for SwiGLU MLPs saves neither silu(gate) nor silu(gate) * up for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.together import adapted_swiglu, together
from shoestring.core.instances import Found, derive
from shoestring.integrations.transformers.layers import MLP, is_bare_mlp
from shoestring.layers.swiglu import swiglu

# Attribute of an attention module: while its forward runs, a dict of computed projection outputs that have
# not been used yet; else None.
OUTPUTS = "_shoestring_projections"
ATTENTION = ("q_proj", "k_proj", "v_proj")


def fuse(model: nn.Module) -> list[Found]:
    """Fuse the projections of attention modules and of Llama-style MLPs.

    A module with the submodules of a Llama-style MLP that computes something else on random tokens is left
    unchanged.

    Returns:
        For each change: the module's name, a description, and a function that reverts it.
    """
    changes = []
    as_written: dict[type, bool] = {}
    for name, module in list(model.named_modules()):
        original = type(module)
        if "forward" in module.__dict__:  # another library has replaced the forward of this module
            continue
        if _has_linears(module, ATTENTION):
            body, what = _attention(original), "query, key and value together"
        elif _has_linears(module, MLP):
            if not is_bare_mlp(module) or not as_written.setdefault(original, _is_swiglu(module)):
                continue
            body, what = _mlp(original), "SwiGLU without its products in memory"
        else:
            continue
        changes.append((name, what, derive(module, body, (OUTPUTS,))))
    return changes


def _has_linears(module: nn.Module, names: Sequence[str]) -> bool:
    return all(isinstance(module._modules.get(name), nn.Linear) for name in names)


def _mlp(original: type[Any]) -> dict[str, Any]:
    @functools.wraps(original.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        y = adapted_swiglu(x, self.gate_proj, self.up_proj, self.down_proj)
        return original.forward(self, x) if y is None else y

    return {"forward": forward}


def _is_swiglu(module: Any) -> bool:
    """Return whether the module computes a SwiGLU MLP, tested on random tokens.

    The tokens are large enough to distinguish silu from other activations.
    """
    weight = module.gate_proj.weight
    tokens = torch.randn(8, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            x = tokens.to(weight.device, weight.dtype)
            x = x * (2 / module.gate_proj(x).float().std()).to(x.dtype)
            expected, ours = module(x), module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
        return bool((ours - expected).norm() <= 0.02 * expected.norm())
    except Exception:  # raised if the module's forward has another signature
        return False
    finally:
        module.train(training)


class Member:
    """An object that replaces one projection (query, key or value) while the attention's forward runs.

    The first of the three projections that is called computes all three outputs.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module = module
        self.name = name

    def __call__(self, x: Tensor) -> Tensor:
        module, state = self.module, getattr(self.module, OUTPUTS)
        if state.get("x") is not x or self.name not in state:
            outputs = together([module._modules[name] for name in ATTENTION], x)
            if outputs is None:
                alone: Tensor = module._modules[self.name](x)
                return alone
            state.clear()
            state.update(zip(ATTENTION, outputs, strict=True), x=x)
        result: Tensor = state.pop(self.name)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module._modules[self.name], name)


def _attention(original: type[Any]) -> dict[str, Any]:
    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, OUTPUTS, {})
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            setattr(self, OUTPUTS, None)

    def member(name: str) -> property:
        return property(
            lambda self: self._modules[name] if getattr(self, OUTPUTS) is None else Member(self, name)
        )

    return {"forward": forward, OUTPUTS: None, **{name: member(name) for name in ATTENTION}}

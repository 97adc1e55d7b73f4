"""Fuse per-head norms of queries and keys (Qwen 3, Gemma 3) with the rotary embedding after the norms.

The attention module's own forward runs unchanged. While it runs, the two norms return a ``Deferred``
placeholder instead of their result. The fused rotary embedding accepts the placeholder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive
from shoestring.core.presence import weights_present

# Name of a method of a fused RMSNorm. For an input x, the method returns the options with which `rope` also
# computes the norm of x, or None if `rope` cannot compute the norm.
JOINT = "_shoestring_joint"
TURNS = "_shoestring_turns"  # name of an attribute that marks attention modules with a fused rotary embedding
JOINING = "_shoestring_joining"  # name of an attribute of attention modules: True while the forward runs
# name of an attribute of attention modules: True while the fused forward is tested
STRICT = "_shoestring_strict"
# Attribute names of the norms of queries and of keys in transformers' attention modules.
PAIRS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))


@dataclass(frozen=True)
class Deferred:
    """A placeholder for the norm of x (..., head_dim), which the fused rotary embedding computes.

    Any other use of the placeholder computes the norm first.
    """

    x: Tensor
    norm: nn.Module
    options: dict[str, Any]  # options for `rope` to compute the norm: weight, eps, offset
    strict: bool

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def transpose(self, dim0: int, dim1: int) -> Any:
        if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim):
            return self.made().transpose(dim0, dim1)
        return Deferred(self.x.transpose(dim0, dim1), self.norm, self.options, self.strict)

    def made(self) -> Tensor:
        if self.strict:
            raise TypeError("a rotation was expected to be what takes this")
        result: Tensor = self.norm(self.x)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)


def made(x: Any) -> Any:
    return x.made() if isinstance(x, Deferred) else x


def joint(q: Any, k: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return queries and keys, and the options with which ``rope`` computes their norms."""
    if not isinstance(q, Deferred) or not isinstance(k, Deferred):
        return made(q), made(k), {}
    a, b = q.options, k.options
    if a["eps"] != b["eps"] or a["offset"] != b["offset"]:
        return q.made(), k.made(), {}
    return (
        q.x,
        k.x,
        {"q_weight": a["weight"], "k_weight": b["weight"], "eps": a["eps"], "offset": a["offset"]},
    )


class HeadNorm:
    """An object that replaces the norm of queries or keys while the attention module's forward runs."""

    def __init__(self, norm: Any, strict: bool) -> None:
        self.norm = norm
        self.strict = strict

    def __call__(self, x: Tensor) -> Any:
        norm = self.norm
        hooks = (
            norm._forward_hooks
            or norm._forward_pre_hooks
            or norm._backward_hooks
            or "forward" in norm.__dict__
        )
        options = getattr(norm, JOINT)(x) if not hooks and hasattr(norm, JOINT) else None
        return norm(x) if options is None else Deferred(x, norm, options, self.strict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.norm, name)


def fuse_head_norms(model: nn.Module, run: Callable[[], object]) -> tuple[list[Found], list[Left]]:
    """Fuse the norms of queries and keys with the rotary embedding in attention modules.

    Each attention module is tested on the arguments that it receives when ``run`` calls the model.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    modules = {
        name: module for name, module in model.named_modules() if hasattr(module, TURNS) and _pair(module)
    }
    calls = _calls(modules, run)
    for name, module in modules.items():
        expected = _result(module, calls.get(name))
        undo = derive(module, _joining(type(module), _pair(module)), (JOINING, STRICT))
        module.__dict__[STRICT] = True
        fused_result = _result(module, calls.get(name))
        del module.__dict__[STRICT]
        if _close(fused_result, expected):
            changes.append((name, "norms of queries and keys with their rotation", undo))
        else:
            undo()
            why = (
                "norms of queries and keys that something else than their rotation reads, or not of each head"
            )
            left.append((name, why))
    return changes, left


def _pair(module: nn.Module) -> tuple[str, ...]:
    """Return the attribute names of an attention module's norms of queries and keys; empty if it has none."""
    return next(
        (pair for pair in PAIRS if all(hasattr(module._modules.get(name), JOINT) for name in pair)), ()
    )


def _calls(modules: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Run a function; return the arguments of the first call of each module, without key-value caches."""
    calls: dict[str, tuple[Any, dict[str, Any]]] = {}
    hooks = []
    for name, module in modules.items():

        def note(_: nn.Module, args: Any, kwargs: dict[str, Any], name: str = name) -> None:
            without_cache = {k: None if k.startswith("past_key_value") else v for k, v in kwargs.items()}
            calls.setdefault(name, (args, without_cache))

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    except Exception:  # ignore errors of the model: patch() runs the model again later and reports them
        calls.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _result(module: nn.Module, call: tuple[Any, dict[str, Any]] | None) -> Tensor | None:
    """Repeat a call of a module in evaluation mode; return its first result, or None if that fails."""
    if call is None:
        return None
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), weights_present(module):
            out = module(*call[0], **call[1])
        result: Tensor | None = out[0] if isinstance(out, tuple) else out
        return result
    except Exception:  # raised if the module's forward has another signature or returns no tensor
        return None
    finally:
        module.train(training)


def _close(fused: Tensor | None, original: Tensor | None) -> bool:
    if fused is None or original is None or fused.shape != original.shape:
        return False
    tolerance = 1e-4 if original.dtype == torch.float32 else 2e-2
    return bool((fused - original).norm() <= tolerance * original.norm())


def _joining(original: type[Any], pair: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes of a class whose forward lets the rotary embedding compute two norms."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, JOINING, True)
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            setattr(self, JOINING, False)

    def member(name: str) -> property:
        def get(self: Any) -> Any:
            norm = self._modules[name]
            return HeadNorm(norm, getattr(self, STRICT)) if getattr(self, JOINING) else norm

        return property(get)

    return {"forward": forward, JOINING: False, STRICT: False, **{name: member(name) for name in pair}}

"""Norms of each head of queries and keys (Qwen 3's, Gemma 3's) that join the rotation behind them: one operator.

The module's own forward runs as it is; its norms return what stands for their result, which the rotation takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive

JOINT = "_shoestring_joint"  # of a fused RMSNorm: what rope has to know of it for this x, or None where that is not all
TURNS = "_shoestring_turns"  # of an attention module: its rotation is rope
JOINING = "_shoestring_joining"  # an attribute of an attention module, true while its forward runs
STRICT = "_shoestring_strict"  # another, true while it is tried
PAIRS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))  # transformers' names


@dataclass(frozen=True)
class Deferred:
    """x (..., head_dim), which the rotation normalises while it turns it; anything else does it first."""

    x: Tensor
    norm: nn.Module
    options: dict[str, Any]  # rope's: weight, eps, offset
    strict: bool

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

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
    """Queries and keys, and rope's options for norms of theirs that are still to be done."""
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
    """One of the two norms while its attention module's forward runs."""

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
    """Attention modules whose rotation and norms are fused; each is tried on what it gets as ``run`` calls the model."""
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
        ours = _result(module, calls.get(name))
        del module.__dict__[STRICT]
        if _close(ours, expected):
            changes.append((name, "norms of queries and keys with their rotation", undo))
        else:
            undo()
            why = (
                "norms of queries and keys that something else than their rotation reads, or not of each head"
            )
            left.append((name, why))
    return changes, left


def _pair(module: nn.Module) -> tuple[str, ...]:
    """The names of its two norms; none where there are no such."""
    return next(
        (pair for pair in PAIRS if all(hasattr(module._modules.get(name), JOINT) for name in pair)), ()
    )


def _calls(modules: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, tuple[Any, dict[str, Any]]]:
    calls: dict[str, tuple[Any, dict[str, Any]]] = {}
    hooks = []
    for name, module in modules.items():

        def note(_: nn.Module, args: Any, kwargs: dict[str, Any], name: str = name) -> None:
            kept = {key: None if key.startswith("past_key_value") else value for key, value in kwargs.items()}
            calls.setdefault(name, (args, kept))

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    except Exception:  # of a model that patch itself will refuse
        calls.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _result(module: nn.Module, call: tuple[Any, dict[str, Any]] | None) -> Tensor | None:
    if call is None:
        return None
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            out = module(*call[0], **call[1])
        result: Tensor | None = out[0] if isinstance(out, tuple) else out
        return result
    except Exception:  # another form
        return None
    finally:
        module.train(training)


def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return False
    tolerance = 1e-4 if theirs.dtype == torch.float32 else 2e-2
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


def _joining(original: type[Any], pair: tuple[str, ...]) -> dict[str, Any]:
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

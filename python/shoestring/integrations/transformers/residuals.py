"""Make decoder layers compute a residual sum and the norm after it in one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive, has_only
from shoestring.integrations.transformers.layers import ADD

# Attribute names of the norms in decoder layers of Llama, Qwen and Mistral in transformers.
NORMS = ("input_layernorm", "post_attention_layernorm")
# Attribute names of the two additional norms in Gemma's decoder layers.
INNER = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def fuse_residuals(model: nn.Module, run: Callable[[], object]) -> tuple[list[Found], list[Left]]:
    """Fuse each residual sum with the norm after it, in decoder layers whose norms are already fused.

    Args:
        model: the model.
        run: function that calls the model, so that a layer of each class can be tested on the arguments that
            the model gives to the layer.

    Returns:
        The changes, and the layers that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    layers = [(name, module) for name, module in model.named_modules() if _looks_so(module)]
    fits = _tried(dict.fromkeys(type(layer) for _, layer in layers), layers, run)
    for name, layer in layers:
        if "forward" in layer.__dict__:
            left.append((name, "a forward of its own, another library's"))
        elif not fits[type(layer)]:
            left.append((name, "a layer that does not add and normalise as Llama's or Gemma's"))
        else:
            changes.append(
                (
                    name,
                    "residual sum and norm together",
                    derive(layer, {"forward": _forward(type(layer).forward)}),
                )
            )
    return changes, left


def _looks_so(module: nn.Module) -> bool:
    parts = module._modules
    known = {*NORMS, *INNER, "self_attn", "mlp"}
    second = parts.get(INNER[0], parts.get(NORMS[1]))
    return (
        has_only(module, known)
        and all(name in parts for name in (*NORMS, "self_attn", "mlp"))
        and hasattr(second, ADD)
    )


def _tried(
    kinds: dict[type, None], layers: list[tuple[str, nn.Module]], run: Callable[[], object]
) -> dict[type, bool]:
    """Return, for each class of decoder layers, whether a layer of it gives the same output when fused."""
    return {kind: _same(next(module for _, module in layers if type(module) is kind), run) for kind in kinds}


def _same(layer: nn.Module, run: Callable[[], object]) -> bool:
    calls: list[tuple[Any, dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        run()
    except Exception:  # ignore errors of the model: patch() runs the model again later and reports them
        return False
    finally:
        hook.remove()
    if not calls:
        return False
    args, kwargs = calls[0]
    kwargs = {key: None if key.startswith("past_key_value") else value for key, value in kwargs.items()}
    original, training, results = type(layer).forward, layer.training, []
    # training mode, so that the comparison includes dropout; both runs start from the same seed
    layer.train()
    try:
        for forward in (original, _forward(original)):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                results.append(forward(layer, *args, **kwargs))
        theirs, ours = results
        tolerance = 1e-4 if theirs.dtype == torch.float32 else 2e-2
        return theirs.shape == ours.shape and bool((ours - theirs).norm() <= tolerance * theirs.norm())
    except Exception:  # raised if the layer's forward has another signature or returns no tensor
        return False
    finally:
        layer.train(training)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, after = self.input_layernorm, self.post_attention_layernorm
        inner = self._modules.get(INNER[0])
        added_to = after if inner is None else inner
        if args or _has_hooks(added_to) or not hasattr(added_to, ADD):
            return original(self, hidden_states, *args, **kwargs)
        attended = self.self_attn(hidden_states=before(hidden_states), **kwargs)[0]
        if inner is not None:
            attended = after(attended)
        normed, residual = getattr(added_to, ADD)(attended, hidden_states)
        out = self.mlp(normed)
        return residual + (out if inner is None else self._modules[INNER[1]](out))

    return forward


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    )

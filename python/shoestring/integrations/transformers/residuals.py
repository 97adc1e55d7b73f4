"""Make the layers of a model compute a residual sum and the norm after it in one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.instances import Found, Left, derive, has_only
from shoestring.core.presence import BRINGS_WEIGHTS, weights_present
from shoestring.integrations.transformers.layers import ADD, ADD_EARLY, ROUNDS
from shoestring.integrations.transformers.next_norms import NEXT, may_defer, next_norms
from shoestring.integrations.transformers.trial import shaken, within_rounding


@dataclass(frozen=True)
class Layout:
    """Attribute names of the parts of a layer: x += attention(norm(x)), and then x += mlp(norm(x)).

    Attributes:
        norms: the norms before attention and before the MLP.
        attention, mlp: the two parts.
        dropout: a dropout of what both parts return; empty if there is none.
        keywords: whether the layer passes all arguments to its attention by keyword.
    """

    norms: tuple[str, str]
    attention: str = "self_attn"
    mlp: str = "mlp"
    dropout: str = ""
    keywords: bool = False


# Decoder layers of Llama, Qwen, Mistral and Gemma; encoder layers of ViT and of CLIP, and their relatives.
DECODER = Layout(("input_layernorm", "post_attention_layernorm"), keywords=True)
LAYOUTS = (
    DECODER,
    Layout(("layernorm_before", "layernorm_after"), "attention", dropout="dropout"),
    Layout(("layer_norm1", "layer_norm2")),
)
# Attribute names of the parts of BERT's output modules, which normalise the sum of a projection and the
# residual.
POST = ("dense", "LayerNorm", "dropout")
# Attribute names of the two additional norms in Gemma's decoder layers.
INNER = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def fuse_residuals(model: nn.Module, run: Callable[[], object]) -> tuple[list[Found], list[Left]]:
    """Fuse each residual sum with the norm after it, in layers whose norms are already fused.

    The layers are those of decoders, ViT and CLIP, and all that have parts of the same names and compute the
    same.

    Args:
        model: the model.
        run: function that calls the model, so that a layer of each class can be tested on the arguments that
            the model gives to the layer.

    Returns:
        The changes, and the layers that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    layers = [(name, module) for name, module in model.named_modules() if _layout(module) is not None]
    tried = {kind: _Trial(kind, layers, run) for kind in dict.fromkeys(type(layer) for _, layer in layers)}
    norms = {
        norm: owner for owner in model.modules() for norm in owner.children() if hasattr(norm, ADD_EARLY)
    }
    following = next_norms([layer for _, layer in layers], norms, run)
    for name, layer in layers:
        if "forward" in layer.__dict__:
            left.append((name, "a forward of its own, another library's"))
        elif not tried[type(layer)].same:
            left.append((name, "a layer that does not add and normalise as its parts suggest"))
        else:
            rounds = tried[type(layer)].rounds
            what = "residual sum and norm together" + ", rounded once under autocast" * rounds
            layout = _layout(layer)
            assert layout is not None
            undo = derive(layer, {"forward": _forward(type(layer).forward, layout)}, (NEXT,))
            if layer in following:
                what += ", also with the norm after the layer"
                layer.__dict__[NEXT] = following[layer]
            changes.append((name, what, functools.partial(_undo, layer, undo) if rounds else undo))
            if rounds:
                for norm in _norms_before_products(layer):
                    norm.__dict__[ROUNDS] = True
    return changes, left


def _norms_before_products(layer: nn.Module) -> list[nn.Module]:
    """Return the norms before the attention and before the MLP of a layer."""
    parts, layout = layer._modules, _layout(layer)
    assert layout is not None
    norms = (parts[layout.norms[0]], parts.get(INNER[0], parts[layout.norms[1]]))
    return [norm for norm in norms if norm is not None and hasattr(norm, ROUNDS)]


def _undo(layer: nn.Module, restore: Callable[[], None]) -> None:
    for norm in _norms_before_products(layer):
        norm.__dict__.pop(ROUNDS, None)
    restore()


def fuse_post_norms(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Fuse the residual sum with the norm after it, in output modules like BERT's.

    Such a module computes ``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``. A test on random
    numbers determines this.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if set(module._modules) != set(POST) or not hasattr(module._modules["LayerNorm"], ADD):
            continue
        if "forward" in module.__dict__ or not has_only(module, set(POST)) or not _is_post_norm(module):
            left.append((name, "a forward of its own, or a module that computes something else"))
            continue
        body = {"forward": _post_norm(type(module).forward)}
        changes.append((name, "residual sum and norm together", derive(module, body)))
    return changes, left


def _is_post_norm(module: Any) -> bool:
    """Return whether a module computes dense, dropout, sum and norm, from a trial on random rows."""
    try:
        rows, training = module.LayerNorm.normalized_shape[0], module.training
        weight = module.LayerNorm.weight
        draw = torch.Generator().manual_seed(0)
        x, residual = (
            torch.randn(2, 4, width, generator=draw).to(weight.device, weight.dtype)
            for width in (module.dense.in_features, rows)
        )
        # training mode, so that the comparison includes dropout; both runs start from the same seed
        module.train()
        original, fused = type(module).forward, _post_norm(type(module).forward)
        results = []
        try:
            for forward, inputs in (
                (original, (x, residual)),
                (fused, (x, residual)),
                (fused, (shaken(x), shaken(residual))),
            ):
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    results.append(forward(module, *inputs))
        finally:
            module.train(training)
        return within_rounding(*results)
    except Exception:  # raised if the module's forward has another signature or its parts are of other kinds
        return False


def _post_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that computes the sum of a residual and its norm together."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Any:
        norm = self.LayerNorm
        if has_hooks(norm) or not hasattr(norm, ADD):
            return original(self, hidden_states, input_tensor)
        return getattr(norm, ADD)(self.dropout(self.dense(hidden_states)), input_tensor)[0]

    return forward


def _layout(module: nn.Module) -> Layout | None:
    """Return the layout whose names the parts of a layer have, if its norms are fused; else None."""
    parts = module._modules
    for layout in LAYOUTS:
        part_names = {*layout.norms, layout.attention, layout.mlp} | (
            {layout.dropout} if layout.dropout else set()
        )
        inner = set(INNER) if layout is DECODER else set()
        second = parts.get(INNER[0] if inner & parts.keys() else layout.norms[1])
        if part_names <= parts.keys() and has_only(module, part_names | inner) and hasattr(second, ADD):
            return layout
    return None


class _Trial:
    """The test of a class of layers, on a layer with the arguments that the model gives to it.

    Attributes:
        same: whether the layer has the same output when it is fused.
        rounds: whether, under autocast, the output has the same bits if the norms before attention and MLP
            round their results. It has if only linear layers read these results.
    """

    def __init__(
        self, kind: type[nn.Module], layers: list[tuple[str, nn.Module]], run: Callable[[], object]
    ) -> None:
        self.same = self.rounds = False
        layer = next(module for _, module in layers if type(module) is kind)
        call = _call(layer, run)
        if call is None:
            return
        original, layout = kind.forward, _layout(layer)
        assert layout is not None
        plain, fused = (_output(layer, forward, call) for forward in (original, _forward(original, layout)))
        if plain is None or fused is None or plain.shape != fused.shape:
            return
        tolerance = 1e-4 if plain.dtype == torch.float32 else 2e-2
        self.same = bool((fused - plain).norm() <= tolerance * plain.norm())
        self.rounds = self.same and all(
            _rounds(layer, call, dtype) for dtype in (torch.bfloat16, torch.float16)
        )


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _call(layer: nn.Module, run: Callable[[], object]) -> _Call | None:
    """Return the arguments with which the model calls a layer, without a cache of keys and values."""
    calls: list[_Call] = []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        run()
    except Exception:  # ignore errors of the model: patch() runs the model again later and reports them
        return None
    finally:
        hook.remove()
    if not calls:
        return None
    args, kwargs = calls[0]
    return args, {key: None if key.startswith("past_key_value") else value for key, value in kwargs.items()}


def _output(layer: nn.Module, forward: Callable[..., Any], call: _Call) -> Tensor | None:
    """Return the output of a layer in training mode with a fixed seed, so that it includes dropout."""
    training = layer.training
    layer.train()
    try:
        with weights_present(layer), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            result: Tensor = forward(layer, *call[0], **call[1])
            return result
    except Exception:  # raised if the layer's forward has another signature or returns no tensor
        return None
    finally:
        layer.train(training)


def _rounds(layer: nn.Module, call: _Call, dtype: torch.dtype) -> bool:
    """Return whether the norms may round to the dtype of autocast themselves without other results."""
    norms, layout = _norms_before_products(layer), _layout(layer)
    assert layout is not None
    forward, device = _forward(type(layer).forward, layout), next(layer.parameters()).device
    with torch.autocast(device.type, dtype):
        plain = _output(layer, forward, call)
        try:
            for norm in norms:
                norm.__dict__[ROUNDS] = True
            rounded = _output(layer, forward, call)
        finally:
            for norm in norms:
                norm.__dict__.pop(ROUNDS, None)
    # Outputs that are not finite, as of weights that fp16 cannot hold, show nothing.
    return plain is not None and rounded is not None and torch.equal(plain.nan_to_num(), rounded.nan_to_num())


def _forward(original: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Return the forward of a decoder layer that computes each residual sum and its norm together."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = self._modules
        before, after = (parts[name] for name in layout.norms)
        inner = parts.get(INNER[0]) if layout is DECODER else None
        added_to = after if inner is None else inner
        if (args and layout.keywords) or has_hooks(added_to) or not hasattr(added_to, ADD):
            return original(self, hidden_states, *args, **kwargs)
        attention, dropout = parts[layout.attention], parts.get(layout.dropout)
        normed = before(hidden_states)
        if layout.keywords:
            attended = attention(hidden_states=normed, **kwargs)[0]
        else:
            attended = attention(normed, *args, **kwargs)[0]
        if dropout is not None:
            attended = dropout(attended)
        if inner is not None:
            attended = after(attended)
        normed, residual = getattr(added_to, ADD)(attended, hidden_states)
        out = parts[layout.mlp](normed)
        if dropout is not None:
            out = dropout(out)
        if inner is not None:
            out = parts[INNER[1]](out)
        total = None
        if may_defer(self, residual):
            norm, owner = self.__dict__[NEXT]
            total = None if has_hooks(owner) else getattr(norm, ADD_EARLY)(out, residual)
        return residual + out if total is None else total

    return forward


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks of a module may see or change its inputs and outputs."""
    allowed = 1 if BRINGS_WEIGHTS in module.__dict__ else 0
    hooks = max(len(module._forward_hooks), len(module._forward_pre_hooks))
    return hooks > allowed or bool(module._backward_hooks) or "forward" in module.__dict__

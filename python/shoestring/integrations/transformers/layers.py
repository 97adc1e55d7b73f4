"""Replace norms, rotary embeddings and gated activations of transformers models by fused operators.

Names and attributes of modules only select candidates. A test on random numbers then determines what a
candidate computes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.instances import Found, Left, derive, has_only, names_dropout
from shoestring.core.presence import weights_present
from shoestring.integrations.transformers.head_norms import JOINT, TURNS, joint, made
from shoestring.integrations.transformers.names import claim, renamed
from shoestring.integrations.transformers.next_norms import PENDING, keep, take
from shoestring.integrations.transformers.trial import shaken, within_rounding
from shoestring.layers.geglu import geglu
from shoestring.layers.layer_norm import add_layer_norm, layer_norm
from shoestring.layers.rms_norm import add_rms_norm, rms_norm
from shoestring.layers.rope import rope
from shoestring.layers.swiglu import swiglu

ROTATION = "apply_rotary_pos_emb"  # name of the rotary function in transformers' model files
MLP = ("gate_proj", "up_proj", "down_proj")
# name of a method of a fused norm: returns the norm of x + residual, and x + residual
ADD = "_shoestring_add"
# Name of a method of a fused norm: returns x + residual, and keeps the norm of the sum until the forward of
# the module is called with the sum. It returns None if the operator does not support the dtypes.
ADD_EARLY = "_shoestring_add_early"
# Name of an attribute of a fused norm: True if only linear layers read its result, so that the norm may
# round the result to the dtype of autocast.
ROUNDS = "_shoestring_rounds"


def fuse_norms(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Replace the forward of RMSNorm and LayerNorm modules by a fused operator.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    tried: dict[type, dict[str, Any] | None] = {}
    for name, module in list(model.named_modules()):
        layer = isinstance(module, nn.LayerNorm)
        if not layer and not type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            continue
        weight = getattr(module, "weight", None)
        if "forward" in module.__dict__:
            left.append((name, "a forward of its own, another library's"))
        elif not isinstance(weight, Tensor) or weight.ndim != 1 or hasattr(weight, "device_mesh"):
            left.append((name, "no weight over the last dimension, or a sharded one"))
        elif layer and type(module).forward is not nn.LayerNorm.forward:
            left.append((name, "a LayerNorm that computes something else"))
        elif layer:
            body = _layer_norm(type(module).forward)
            changes.append((name, "fused LayerNorm", derive(module, body, (ROUNDS, PENDING))))
        else:
            options = tried.setdefault(type(module), _norm_options(module))
            if options is None:
                left.append((name, "a norm that computes something else"))
                continue
            what = f"fused RMSNorm, upcast {options['upcast']!r}" + (
                ", offset 1" if options["offset"] else ""
            )
            changes.append(
                (name, what, derive(module, _rms_norm(type(module).forward, options), (ROUNDS, PENDING)))
            )
    return changes, left


def _eps(module: Any, x: Tensor) -> float:
    """Return the eps of a norm by any of its names, or the one that PyTorch takes without it."""
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    return torch.finfo(x.dtype).eps if eps is None else float(eps)


def _norm_options(module: Any) -> dict[str, Any] | None:
    """Return an RMSNorm's options ``offset`` and ``upcast``, found from the rounding of its bf16 results.

    Return None if the module does not compute an RMSNorm.
    """
    draw = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            trial = copy.deepcopy(module).to("cpu", torch.bfloat16)
            weight = torch.randn(trial.weight.shape, generator=draw).bfloat16()
            trial.weight = nn.Parameter(weight, requires_grad=False)
            x = torch.randn(64, len(weight), generator=draw).bfloat16()
            expected, agree = trial(x), {}
            for offset, upcast in ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma")):
                fused = rms_norm(x, weight, eps=_eps(module, x), offset=offset, upcast=upcast)
                agree[offset, upcast] = (fused == expected).double().mean().item()
    except Exception:  # raised if the norm's forward has another signature
        return None
    (offset, upcast), share = max(agree.items(), key=lambda item: item[1])
    return {"offset": offset, "upcast": upcast} if share > 0.99 else None


def _rounds_to(norm: Any, rows: Tensor) -> torch.dtype | None:
    """Return the dtype to which a fused norm rounds its result for ``rows`` under autocast, if any."""
    narrow = _autocast_dtype(rows)
    fits = getattr(norm, ROUNDS) and rows.dtype == torch.float32
    return narrow if fits and narrow in (torch.bfloat16, torch.float16) else None


def _rms_norm(original: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    # Whether the norm's result has the wider of the dtypes of x and the weight, which the fused operator does
    # not support.
    def widens(self: Any, x: Tensor) -> bool:
        return bool(options["upcast"] == "llama" and self.weight.dtype != x.dtype)

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        out = _rounds_to(self, x)
        computed = take(self, x, out)
        if computed is not None:
            return computed
        if widens(self, x):
            result: Tensor = original(self, x)
            return result
        return rms_norm(x, self.weight, eps=_eps(self, x), out_dtype=out, **options)

    def add(self: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out = _rounds_to(self, residual)
        if widens(self, residual) or x.dtype not in (residual.dtype, out):
            total = residual + x
            return forward(self, total), total
        return add_rms_norm(x, residual, self.weight, eps=_eps(self, residual), out_dtype=out, **options)

    def add_early(self: Any, x: Tensor, residual: Tensor) -> Tensor | None:
        out = _rounds_to(self, residual)
        if widens(self, residual) or x.dtype not in (residual.dtype, out):
            return None
        normed, total = add(self, x, residual)
        keep(self, total, normed, out)
        return total

    def alone(self: Any, x: Tensor) -> dict[str, Any] | None:
        # Under autocast, attention rounds the wider result of a norm to the dtype of x anyway.
        fits = x.shape[-1] == len(self.weight) and (not widens(self, x) or x.dtype == _autocast_dtype(x))
        return {"weight": self.weight, "eps": _eps(self, x), "offset": options["offset"]} if fits else None

    return {"forward": forward, ADD: add, ADD_EARLY: add_early, JOINT: alone, ROUNDS: False}


def _layer_norm(original: Callable[..., Any]) -> dict[str, Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        out = _rounds_to(self, x)
        computed = take(self, x, out)
        if computed is not None:
            return computed
        if self.weight.dtype != x.dtype:
            result: Tensor = original(self, x)
            return result
        return layer_norm(x, self.weight, self.bias, eps=self.eps, out_dtype=out)

    # Whether the operator takes x and the residual.
    def fits(self: Any, x: Tensor, residual: Tensor, out: torch.dtype | None) -> bool:
        wide = residual.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
        return bool(
            self.weight.dtype == residual.dtype
            and x.shape == residual.shape
            and (x.dtype == residual.dtype or (wide and out in (None, x.dtype)))
        )

    def add(self: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out = _rounds_to(self, residual)
        if not fits(self, x, residual, out):
            total = x + residual
            return forward(self, total), total
        return add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps, out_dtype=out)

    def add_early(self: Any, x: Tensor, residual: Tensor) -> Tensor | None:
        out = _rounds_to(self, residual)
        if not fits(self, x, residual, out):
            return None
        normed, total = add(self, x, residual)
        keep(self, total, normed, out)
        return total

    return {"forward": forward, ADD: add, ADD_EARLY: add_early, ROUNDS: False}


def fuse_rotations(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Use ``rope`` in attention modules whose forward calls ``apply_rotary_pos_emb``.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    tried: dict[Any, tuple[bool, bool] | None] = {}
    forwards: dict[Any, Callable[..., Any]] = {}
    for name, module in list(model.named_modules()):
        forward = type(module).forward
        code = getattr(forward, "__code__", None)
        if code is None or ROTATION not in code.co_names or ROTATION not in forward.__globals__:
            continue
        function = forward.__globals__[ROTATION]
        kind = tried.setdefault(function, _kind(function))
        if "forward" in module.__dict__:
            left.append((name, "a forward of its own, another library's"))
        elif kind is None:
            left.append((name, "a rotary embedding that computes something else"))
        else:
            if forward not in forwards:
                forwards[forward] = renamed(forward, ROTATION)
            restore = derive(module, {"forward": forwards[forward], TURNS: True})
            release = claim(forward, ROTATION, _rotation(function, *kind))
            changes.append((name, "fused rotary embedding", functools.partial(_undo, restore, release)))
    return changes, left


def _undo(restore: Callable[[], None], release: Callable[[], None]) -> None:
    restore()
    release()


def _kind(function: Callable[..., Any]) -> tuple[bool, bool] | None:
    """Return how a rotary function arranges the pairs of elements that it rotates.

    Returns:
        Two flags: whether the two elements of a pair are neighbours (interleaved), and whether cos and sin
        are nevertheless laid out as for elements that are half a head apart. None: the function computes no
        rotary embedding.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=draw) for heads in (2, 1))
    angles = torch.rand(1, 3, 4, generator=draw)
    apart, beside = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    for table, kind in ((apart, (False, False)), (apart, (True, True)), (beside, (True, False))):
        try:
            with torch.no_grad():
                original = function(q, k, table.cos(), table.sin())
            fused = rope(q, k, angles.cos(), angles.sin(), interleaved=kind[0])
            if all(torch.allclose(a, b, atol=1e-5) for a, b in zip(original, fused, strict=True)):
                return kind
        except Exception:  # raised if the rotary function has another signature
            return None
    return None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast if autocast is on for the device of x, else None."""
    device = x.device.type
    if device == "meta":  # autocast does not know this device
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _rotation(original: Callable[..., Any], interleaved: bool, of_halves: bool) -> Callable[..., Any]:
    """Return ``apply_rotary_pos_emb`` with a fused kernel, for the calls that the kernel can compute."""

    @functools.wraps(original)
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_supported = (
            q.ndim == 4
            and cos.ndim == 3
            and q.dtype == k.dtype
            and cos.dtype == sin.dtype
            and not cos.requires_grad
            # With tables of fp32, the original function returns q and k in fp32. Attention rounds them to
            # the dtype of autocast, to which the operator rounds them at once.
            and (q.dtype == cos.dtype or (cos.dtype == torch.float32 and q.dtype == _autocast_dtype(q)))
        )
        is_supported = is_supported and not args and not kwargs
        q, k, norms = joint(q, k) if is_supported else (made(q), made(k), {})
        if not is_supported or q.dtype != k.dtype:  # under autocast, a norm of q alone may widen it
            return original(q, k, cos, sin, *args, **kwargs)
        width = cos.shape[-1]
        if of_halves:
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        return rope(q, k, cos, sin, rotary_dim=width, interleaved=interleaved, **norms)

    return apply_rotary_pos_emb


def fuse_mlps(model: nn.Module) -> tuple[list[Found], list[Left]]:
    """Replace the gated activation of Llama-style MLPs by the operators SwiGLU and GeGLU.

    Returns:
        The changes, and the modules that are left unchanged with the reason.
    """
    changes: list[Found] = []
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if not all(isinstance(module._modules.get(part), nn.Linear) for part in MLP):
            continue
        gated = _gated(module) if "forward" not in module.__dict__ and is_bare_mlp(module) else None
        if gated is None:
            left.append(
                (name, "a forward of its own, parts besides, or an activation that is neither silu nor gelu")
            )
            continue
        function, what = gated
        changes.append(
            (name, f"fused {what}", derive(module, {"forward": _mlp(type(module).forward, function)}))
        )
    return changes, left


def is_bare_mlp(module: nn.Module) -> bool:
    """Return whether an MLP has only its three projections and an activation, and uses no dropout."""
    return has_only(module, {*MLP, "act_fn"}) and not names_dropout(module)


def _gated(module: Any) -> tuple[Callable[[Tensor, Tensor], Tensor], str] | None:
    """Return the fused operator for an MLP's gated activation, and its name; None if no operator fits."""
    kinds = (
        (F.silu, swiglu, "SwiGLU"),
        (
            functools.partial(F.gelu, approximate="tanh"),
            functools.partial(geglu, approximate="tanh"),
            "GeGLU (tanh)",
        ),
        (F.gelu, functools.partial(geglu, approximate="none"), "GeGLU"),
    )
    draw = torch.Generator().manual_seed(0)
    x = torch.linspace(-6, 6, 97)
    weight = module.gate_proj.weight
    training = module.training
    module.eval()
    try:
        with weights_present(module), torch.no_grad():
            tokens = torch.randn(8, module.gate_proj.in_features, generator=draw).to(
                weight.device, _floating(weight)
            )
            gate, up = module.gate_proj(tokens), module.up_proj(tokens)
            for plain, ours, what in kinds:
                if not torch.allclose(module.act_fn(x), plain(x), rtol=1e-5, atol=1e-6):
                    continue
                product = ours(gate, up)
                fused, disturbed = module.down_proj(product), module.down_proj(shaken(product))
                return (ours, what) if within_rounding(module(tokens), fused, disturbed) else None
    except Exception:  # raised if the MLP's forward has another signature or returns no tensor
        return None
    finally:
        module.train(training)
    return None


def _floating(weight: Tensor) -> torch.dtype:
    return weight.dtype if weight.is_floating_point() else torch.float32


def _mlp(original: Callable[..., Any], function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(function(self.gate_proj(x), self.up_proj(x)))
        return result

    return forward

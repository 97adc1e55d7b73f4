"""Operators under the samples by which PyTorch tests its own, with PyTorch in fp64 as the reference.

The samples come from ``torch.testing._internal.common_methods_invocations``, so a newer PyTorch brings newer
samples. Values and gradients are compared.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import error_of, refused
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import shoestring

# Returns a result of our operator for a sample of PyTorch's.
Ours = Callable[..., Tensor]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
) -> Tensor:
    options.pop("enable_gqa", None)
    if is_causal and q.shape[-2] != k.shape[-2]:
        # PyTorch counts the visible keys from the first one, and this library from the last one.
        is_causal, attn_mask = False, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return shoestring.attention(q, k, v, bias=attn_mask, causal=is_causal, **options)


def _cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    return shoestring.cross_entropy(logits, target, class_weights=weight, dim=1, **options)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    flat = [None if t is None else t.flatten() for t in (weight, bias)]
    return shoestring.layer_norm(x.flatten(x.dim() - len(shape)), *flat, eps=eps).view(x.shape)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    weight = None if weight is None else weight.flatten()
    return shoestring.rms_norm(x.flatten(x.dim() - len(shape)), weight, eps=eps).view(x.shape)


def _embedding(weight: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return shoestring.embedding(ids, weight, **options)


OPERATORS: dict[str, Ours] = {
    "nn.functional.scaled_dot_product_attention": _attention,
    "nn.functional.cross_entropy": _cross_entropy,
    "nn.functional.layer_norm": _layer_norm,
    "nn.functional.rms_norm": _rms_norm,
    "nn.functional.gelu": shoestring.gelu,
    "nn.functional.embedding": _embedding,
    "nn.functional.linear": shoestring.linear,
}


@functools.cache
def samples_of(name: str, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """Return PyTorch's samples, except those with random results."""
    torch.manual_seed(seed)
    info = next(op for op in op_db if op.name == name)
    samples = info.sample_inputs("cpu", dtype, requires_grad=True)
    return [s for s in samples if not s.kwargs.get("dropout_p")]


def refusal(name: str, sample: Any) -> str | None:
    """Return what the error of an operator names if it does not support a sample."""
    if name.endswith("cross_entropy") and sample.args[0].is_floating_point():
        return "target"  # probabilities of classes
    if name.endswith("_norm") and sample.kwargs.get("eps", 0) < 0:
        return "eps"
    return None


def terms_of(name: str, sample: Any) -> float:
    """Return the largest factor of the terms whose sum is a gradient; they may cancel to zero.

    In the gradient of a norm, it is the reciprocal of the root of the variance plus eps. In the gradients of
    attention, which softmax makes of differences, it is a key times a value.
    """
    if "attention" in name:
        return float(sample.args[0].detach().abs().max() * sample.args[1].detach().abs().max())
    if not name.endswith("_norm"):
        return 0.0
    eps = sample.kwargs.get("eps") or (1e-5 if "layer" in name else torch.finfo(sample.input.dtype).eps)
    return eps**-0.5


def condition_of(name: str, sample: Any) -> float:
    """Return the factor by which a computation multiplies a relative rounding error.

    In attention, a relative error e of a score s makes the relative error e s of its exponential.
    """
    if "attention" not in name:
        return 0.0
    q, k = sample.input.detach(), sample.args[0].detach()
    return float((q.abs() @ k.abs().transpose(-1, -2)).max()) / q.shape[-1] ** 0.5


def tensors_of(value: Any) -> list[Tensor]:
    return [t for t in (value.input, *value.args, *value.kwargs.values()) if isinstance(t, Tensor)]


def run(function: Ours, sample: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the result and the gradients of the inputs, which are cast to a dtype first."""
    cast = sample.transform(
        lambda x: (
            x.detach().to(dtype).requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
        )
    )
    result = function(cast.input, *cast.args, **cast.kwargs)
    upstream = torch.linspace(0.5, 1.5, result.numel(), dtype=dtype).view(result.shape)
    inputs = [t for t in tensors_of(cast) if t.requires_grad]
    return [result, *torch.autograd.grad(result, inputs, upstream.to(result.dtype))]


CASES = [
    (name, dtype, index)
    for name in OPERATORS
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for index in range(len(samples_of(name, torch.float32)))
]


@pytest.mark.parametrize(
    ("name", "dtype", "index"), CASES, ids=[f"{n.rpartition('.')[2]}-{str(d)[6:]}-{i}" for n, d, i in CASES]
)
def test_sample(name: str, dtype: torch.dtype, index: int, seed: int) -> None:
    sample = samples_of(name, torch.float64, seed)[index]
    info = next(op for op in op_db if op.name == name)
    option = refusal(name, sample)
    if option is not None:
        with refused(option):
            run(OPERATORS[name], sample, dtype)
    rounded = sample.transform(
        lambda x: (
            x.detach().to(dtype).double().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
        )
    )
    exact = run(info.op, rounded, torch.float64)
    peer = run(info.op, rounded, dtype)
    ours = run(OPERATORS[name], rounded, dtype)
    # In fp64 the reference is as inexact as the result. Other dtypes are computed in fp32.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = torch.finfo(dtype).eps * (16 if dtype == torch.float64 else 2)
    unit += torch.finfo(wide).eps * condition_of(name, rounded)
    for result, theirs, reference in zip(ours, peer, exact, strict=True):
        assert result.shape == theirs.shape
        nan = reference.isnan()
        assert torch.equal(result.isnan(), nan)
        errors = [error_of(r[~nan], reference[~nan], terms_of(name, rounded)) for r in (result, theirs)]
        # PyTorch's error may be zero by luck in a small sample; a result has at least one rounding.
        assert errors[0] <= 2 * errors[1] + unit, errors


def test_multihead_attention_layer_gives_the_same(seed: int) -> None:
    """The projections and heads of ``torch.nn.MultiheadAttention`` around our attention."""
    layer = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    q, k, v = (
        t.unflatten(-1, (4, 8)).transpose(1, 2)
        for t in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    ours = layer.out_proj(shoestring.attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, layer(x, x, x)[0])

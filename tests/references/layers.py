"""Embeddings, norms, rotary embeddings, activations and dropout in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .core import philox


def embedding_reference(
    ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, scale_grad_by_freq: bool = False
) -> Tensor:
    """Compute ``embedding`` in plain PyTorch."""
    return F.embedding(ids, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``layer_norm`` in plain PyTorch."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    weight, bias = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(out_dtype or x.dtype)


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``add_layer_norm`` in plain PyTorch."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps, out_dtype=out_dtype), total


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    upcast: str = "llama",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``rms_norm`` in plain PyTorch."""
    wide = x if x.dtype == torch.float64 else x.float()
    out = out_dtype or x.dtype
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    row = wide * rstd
    if upcast == "none":
        row = x * rstd.to(x.dtype)
    if upcast == "llama":
        row = row.to(x.dtype).to(wide.dtype)
    if weight is None:
        return row.to(out)
    factor = weight.to(wide.dtype) + offset
    return (row * (factor.to(x.dtype) if upcast == "none" else factor)).to(out)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    upcast: str = "llama",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``add_rms_norm`` in plain PyTorch."""
    total = x + residual
    options: dict[str, Any] = {"eps": eps, "offset": offset, "upcast": upcast, "out_dtype": out_dtype}
    return rms_norm_reference(total, weight, **options), total


def rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute ``rope`` in plain PyTorch."""
    n = q.shape[-1] if rotary_dim is None else rotary_dim
    if cos.shape[-1] == n and n:
        cos, sin = (t[..., ::2] if interleaved else t[..., : n // 2] for t in (cos, sin))
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (t.unsqueeze(-2 if q.ndim == 3 else -3).to(q.dtype) for t in (cos, sin))

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = rms_norm_reference(x, weight, eps=eps, offset=offset, upcast="gemma")
        part, rest = x[..., :n], x[..., n:]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        both = a * cos - b * sin, b * cos + a * sin
        return torch.cat(
            [torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest], -1
        )

    return turned(q, q_weight), turned(k, k_weight)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu`` in plain PyTorch."""
    return F.gelu(x, approximate=approximate)


def geglu_reference(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``gelu(gate) * up`` (``geglu``) in plain PyTorch."""
    return F.gelu(gate, approximate=approximate) * up


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``swiglu`` in plain PyTorch."""
    return F.silu(gate) * up


def seeded_dropout_reference(x: Tensor, seed: Tensor, p: float = 0.5) -> Tensor:
    """Compute ``seeded_dropout`` in plain PyTorch, with the mask in memory."""
    index = torch.arange((x.numel() + 7) // 8)
    zero = torch.zeros_like(index)
    drawn = philox([index, index >> 32, zero, zero], int(seed))[: x.numel()]
    threshold = min(round(p * 65536), 65535)
    kept = (drawn >= threshold).to(x.device).view(x.shape)
    return torch.where(kept, x * (65536 / (65536 - threshold)), 0).to(x.dtype)

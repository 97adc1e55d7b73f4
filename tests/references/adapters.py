"""LoRA layers in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.quantization.quantized_tensor import QuantizedTensor

from .layers import seeded_dropout_reference


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    gain: Tensor | None = None,
    low_scale: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Compute ``lora_linear`` in plain PyTorch as PEFT does, with adapter products in the adapter's dtype."""
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize(torch.float32)
    if gate is not None:
        x = F.silu(gate) * x
    y = F.linear(x, weight.to(x.dtype))
    if lora_A is not None and lora_B is not None:
        branch = x if seed is None else seeded_dropout_reference(x, seed, dropout)
        low = F.linear(branch.to(lora_A.dtype), lora_A)
        if low_scale is not None:
            low = (low.flatten(0, -2) * low_scale).view_as(low)
        y = y + scaling * F.linear(low.to(lora_B.dtype), lora_B)
    if gain is not None:
        y = gain * y
    return (y if bias is None else y + bias.to(x.dtype)).to(x.dtype)


def lora_weight_norm_reference(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float = 1.0
) -> Tensor:
    """Compute ``lora_weight_norm`` in plain PyTorch, which stores the whole adapted weight as a temporary."""
    exact = torch.float64 if torch.float64 in (weight.dtype, lora_A.dtype) else torch.float32
    dense = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight
    result: Tensor = (dense.to(exact) + scaling * lora_B.to(exact) @ lora_A.to(exact)).norm(dim=1)
    return result

"""The product of an adapted layer, until the operator has all of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.quantized_tensor import QuantizedTensor


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    gain: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    low_scale: Tensor | None = None,
) -> Tensor:
    dense = weight.dequantize(x.dtype) if isinstance(weight, QuantizedTensor) else weight
    y = F.linear(x, dense)
    if lora_A is not None:
        low = F.linear(F.dropout(x, dropout).to(lora_A.dtype), lora_A)
        if low_scale is not None:
            low = low * low_scale.view(low.shape)
        y = y + scaling * F.linear(low, lora_B)
    y = y if gain is None else y * gain
    return (y if bias is None else y + bias).to(x.dtype)


def lora_weight_norm(weight: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float) -> Tensor:
    dense = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight
    return torch.addmm(dense.to(lora_A.dtype), lora_B, lora_A, alpha=scaling).norm(dim=1)

"""A linear layer with a low-rank adapter."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.quantized_tensor import QuantizedTensor


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias + scaling * (x @ lora_A.T) @ lora_B.T`` over a frozen weight, dense or quantised.

    Backward keeps x once, in its own dtype, and the (tokens, rank) product with lora_A. The low-rank part is added into
    the output by its product, without tensors of its own.

    Args:
        x: (..., in_features); fp32, fp64, bf16 or fp16. On the CPU products are fp32 (fp64 for
            fp64) and rounded once, but bf16 where the CPU has units for that.
        weight: (out_features, in_features), frozen: x's dtype, or a :class:`QuantizedTensor`.
        lora_A: (rank, in_features), any floating-point dtype.
        lora_B: (out_features, rank), any floating-point dtype.
        bias: (out_features), any floating-point dtype.
        scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        dropped: what lora_A reads in place of x (dropout), x's shape and dtype.

    Returns:
        (..., out_features), x's dtype. Bitwise repeatable. Differentiable once by x, dropped, bias, lora_A and lora_B.

    Raises:
        RuntimeError: a shape or dtype that does not fit, or a weight that requires a gradient.

    The method is LoRA (arXiv 2106.09685).
    """
    op = torch.ops.shoestring.lora_linear
    if not isinstance(weight, QuantizedTensor):
        return op(x, weight, None, None, bias, lora_A, lora_B, dropped, scaling=scaling)
    return op(
        x,
        weight.packed,
        weight.absmax,
        weight.nested,
        bias,
        lora_A,
        lora_B,
        dropped,
        scaling=scaling,
        quant_type=weight.quant_type,
        block_size=weight.block_size,
    )


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, as PEFT composes it: adapter in its own dtype, result in x's."""
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize(torch.float32)
    base = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    low = F.linear((x if dropped is None else dropped).to(lora_A.dtype), lora_A)
    return (base + scaling * F.linear(low.to(lora_B.dtype), lora_B)).to(x.dtype)

"""Linear layers with low-rank adapters, and what DoRA needs of their weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.layers.seeded_dropout import draw_seed, seeded_dropout_reference
from shoestring.quantization.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class LoraWeight:
    """A frozen weight with an adapter, or without; see :func:`lora_linear` for the fields."""

    weight: Tensor
    lora_A: Tensor | None = None
    lora_B: Tensor | None = None
    bias: Tensor | None = None
    scaling: float = 1.0
    gain: Tensor | None = None
    low_scale: Tensor | None = None

    def parts(self) -> list[Tensor | None]:
        """In the order that the operator takes them."""
        return [*base_parts(self.weight)[:3], self.bias, self.lora_A, self.lora_B, self.gain, self.low_scale]


def base_parts(weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, str, int]:
    """A dense or quantised weight as operators take it: weight, absmax, nested, quant_type, block_size."""
    if isinstance(weight, QuantizedTensor):
        return weight.packed, weight.absmax, weight.nested, weight.quant_type, weight.block_size
    return weight, None, None, "nf4", 64


def lora_linear(
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
    """``gain * (x @ weight.T + scaling * low @ lora_B.T) + bias`` with ``low = low_scale * dropped(x) @ lora_A.T``, over a
    frozen weight, dense or quantised.

    Backward keeps x once, in its own dtype, and low, which is (tokens, rank). The low-rank part is added into the output
    by its product, without tensors of its own.

    Args:
        x: (..., in_features); fp32, fp64, bf16 or fp16. On the CPU products are fp32 (fp64 for
            fp64) and rounded once, but bf16 where the CPU has units for that.
        weight: (out_features, in_features), frozen: x's dtype, or a :class:`QuantizedTensor`.
        lora_A: (rank, in_features), any floating-point dtype, as the following; with lora_B, or neither.
        lora_B: (out_features, rank).
        bias: (out_features).
        scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        gain: (out_features). DoRA (arXiv 2402.09353): the magnitude over :func:`lora_weight_norm`; IA3 (arXiv 2205.05638):
            its vector, with the bias multiplied by it too. The output is kept for its gradient, which is 0 where it is 0.
        low_scale: (tokens, rank), without a gradient; zeros for the adapters that a token does not have, say.
        gate: x's shape and dtype: the layer reads ``silu(gate) * x``, and neither this product nor silu is kept for
            backward (SwiGLU's down projection).
        dropout: probability of dropping an element of what lora_A reads. The mask is made from the seed, in backward
            once more, and not kept.
        seed: one int64 on x's device; None draws one, from the device's generator.

    Returns:
        (..., out_features), x's dtype. Bitwise repeatable, given the seed. Differentiable once by x, gate, bias, lora_A,
        lora_B and gain.

    Raises:
        RuntimeError: a shape or dtype that does not fit, or a weight that requires a gradient.

    The method is LoRA (arXiv 2106.09685).
    """
    weight, absmax, nested, quant_type, block_size = base_parts(weight)
    result: Tensor = torch.ops.shoestring.lora_linear(
        x,
        weight,
        absmax,
        nested,
        bias,
        lora_A,
        lora_B,
        gain=gain,
        low_scale=low_scale,
        gate=gate,
        seed=draw_seed(x) if dropout > 0 and seed is None else seed,
        dropout=dropout,
        scaling=scaling,
        quant_type=quant_type,
        block_size=block_size,
    )
    return result


def lora_linear_group(
    x: Tensor,
    layers: Sequence[LoraWeight],
    *,
    gate: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> list[Tensor]:
    """:func:`lora_linear` for several layers that read one input: the projections of query, key and value, or SwiGLU's
    two. x is kept once; it is dropped, and multiplied by the matrices A, once for all; and the gradients by it are summed
    as they are made, in fp32 where there are several.

    Args:
        x, gate, dropout, seed: as there; the layers share the mask.
        layers: their weights and adapters, with different sizes, ranks and quantisations where that is so.

    Returns:
        Each layer's (..., out_features).

    Raises:
        RuntimeError: as there.
    """
    bases = [base_parts(layer.weight) for layer in layers]
    result: list[Tensor] = torch.ops.shoestring.lora_linear_group(
        x,
        [part for layer in layers for part in layer.parts()],
        gate,
        draw_seed(x) if dropout > 0 and seed is None else seed,
        dropout,
        [layer.scaling for layer in layers],
        [base[3] for base in bases],
        [base[4] for base in bases],
    )
    return result


def lora_weight_norm(weight: Tensor, lora_A: Tensor, lora_B: Tensor, *, scaling: float = 1.0) -> Tensor:
    """The norms of the rows of ``weight + scaling * lora_B @ lora_A``, without a temporary of the weight's size.

    Args:
        weight: (out_features, in_features), dense or a :class:`QuantizedTensor`.
        lora_A: (rank, in_features).
        lora_B: (out_features, rank).
        scaling: as in :func:`lora_linear`.

    Returns:
        (out_features), fp32, or fp64 where the weight or lora_A is. Without gradients: DoRA (arXiv 2402.09353) takes it
        for a constant.

    Raises:
        RuntimeError: a shape or dtype that does not fit.
    """
    weight, absmax, nested, quant_type, block_size = base_parts(weight)
    result: Tensor = torch.ops.shoestring.lora_weight_norm(
        weight, absmax, nested, lora_A, lora_B, scaling=scaling, quant_type=quant_type, block_size=block_size
    )
    return result


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
    """The same in plain PyTorch, as PEFT composes it: adapter in its own dtype, result in x's."""
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
    """The same in plain PyTorch, with the whole sum of the matrices."""
    exact = torch.float64 if torch.float64 in (weight.dtype, lora_A.dtype) else torch.float32
    dense = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight
    result: Tensor = (dense.to(exact) + scaling * lora_B.to(exact) @ lora_A.to(exact)).norm(dim=1)
    return result

"""Functions that compute linear layers with low-rank adapters, and the weight norms that DoRA needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.layers.seeded_dropout import draw_seed
from shoestring.quantization.quantized_tensor import QuantizedTensor

__all__ = ["LoraWeight", "lora_linear", "lora_linear_group", "lora_weight_norm"]


@dataclass(frozen=True)
class LoraWeight:
    """A frozen weight, with or without an adapter. Fields have the names of :func:`lora_linear` arguments.

    Example:
        >>> weight, lora_A, lora_B = torch.randn(6, 8), torch.randn(4, 8), torch.zeros(6, 4)
        >>> layer = shoestring.ops.LoraWeight(weight, lora_A, lora_B, scaling=2.0)
        >>> (y,) = shoestring.lora_linear_group(torch.randn(5, 8), [layer])
        >>> y.shape
        torch.Size([5, 6])
    """

    weight: Tensor
    lora_A: Tensor | None = None
    lora_B: Tensor | None = None
    bias: Tensor | None = None
    scaling: float = 1.0
    gain: Tensor | None = None
    low_scale: Tensor | None = None

    def parts(self) -> list[Tensor | None]:
        """Return the tensors of this layer in the order in which the C++ operator expects them."""
        return [*base_parts(self.weight)[:3], self.bias, self.lora_A, self.lora_B, self.gain, self.low_scale]


def base_parts(weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, str, int]:
    """Return weight, absmax, nested, quant_type and block_size: the operator arguments for a weight."""
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
    """Compute a linear layer with a frozen, dense or quantised weight and a low-rank adapter.

    The method is LoRA (arXiv 2106.09685). The result is ``gain * (x @ weight.T + scaling * low @ lora_B.T) +
    bias``, where ``low = low_scale * (dropout(x) @ lora_A.T)``. Only x, in its own dtype, and low (tokens,
    rank) are saved for backward. The product with lora_B is accumulated into the output, without a temporary
    of the size of the output.

    Args:
        x: (..., in_features); fp32, fp64, bf16 or fp16. The CPU computes matrix products in fp32 (fp64 for
            fp64 inputs) and rounds the result once. A CPU with bf16 matrix units multiplies bf16 input in
            bf16.
        weight: (out_features, in_features), frozen, in the dtype of x; or a :class:`QuantizedTensor`.
        lora_A: (rank, in_features). lora_A, lora_B, bias and gain may have any floating-point dtype. Give
            lora_A and lora_B together, or neither.
        lora_B: (out_features, rank).
        bias: (out_features).
        scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        gain: (out_features). For DoRA (arXiv 2402.09353): the magnitude divided by :func:`lora_weight_norm`.
            For IA3 (arXiv 2205.05638): the trained vector; the caller must multiply the bias by the vector
            too. The output is saved to compute the gradient of gain, which is 0 where gain is 0.
        low_scale: (tokens, rank), not differentiable. For example, zeros switch adapters off for some tokens.
        gate: a tensor with the shape and dtype of x. The input of the layer is then ``silu(gate) * x``, as
            for the down projection of SwiGLU. Neither this product nor ``silu(gate)`` is saved for backward.
        dropout: probability of dropping an element of the input of lora_A. The mask is a function of the
            seed. Backward computes it again.
        seed: one int64 on the device of x. None: draw a seed from the device's default generator.

    Returns:
        (..., out_features), in the dtype of x. Bitwise repeatable for a given seed. Differentiable once with
        respect to x, gate, bias, lora_A, lora_B and gain.

    Raises:
        RuntimeError: a shape or dtype does not fit, or the weight requires a gradient.

    Example:
        >>> x, weight = torch.randn(2, 8), torch.randn(6, 8)
        >>> lora_A, lora_B = torch.randn(4, 8), torch.randn(6, 4)
        >>> y = shoestring.lora_linear(x, weight, lora_A, lora_B, scaling=2.0)
        >>> torch.allclose(y, x @ (weight + 2.0 * lora_B @ lora_A).T, atol=1e-3)
        True
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
    """Compute :func:`lora_linear` for several layers with the same input.

    The layers may be the query, key and value projections, or the gate and up projections of SwiGLU. x is
    saved once. Dropout and the product with lora_A are computed once for all layers. The gradients of x are
    accumulated in place, in fp32 if there are several layers.

    Args:
        x, gate, dropout, seed: as in :func:`lora_linear`; the layers share the dropout mask.
        layers: the weights and adapters, whose sizes, ranks and quantisation may differ.

    Returns:
        The output of each layer, (..., out_features).

    Raises:
        RuntimeError: as in :func:`lora_linear`.

    Example:
        >>> query = shoestring.ops.LoraWeight(torch.randn(8, 8), torch.randn(4, 8), torch.zeros(8, 4))
        >>> key = shoestring.ops.LoraWeight(torch.randn(2, 8))
        >>> [tuple(y.shape) for y in shoestring.lora_linear_group(torch.randn(5, 8), [query, key])]
        [(5, 8), (5, 2)]
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
    """Compute the norms of the rows of ``weight + scaling * lora_B @ lora_A``.

    No temporary of the size of the weight is allocated.

    Args:
        weight: (out_features, in_features), dense or a :class:`QuantizedTensor`.
        lora_A: (rank, in_features).
        lora_B: (out_features, rank).
        scaling: as in :func:`lora_linear`.

    Returns:
        (out_features), fp32, or fp64 if weight or lora_A is fp64. Not differentiable, because DoRA (arXiv
        2402.09353) treats the norm as a constant.

    Raises:
        RuntimeError: a shape or dtype does not fit.

    Example:
        >>> weight, lora_A, lora_B = torch.eye(4), torch.randn(2, 4), torch.zeros(4, 2)
        >>> shoestring.lora_weight_norm(weight, lora_A, lora_B)
        tensor([1., 1., 1., 1.])
    """
    weight, absmax, nested, quant_type, block_size = base_parts(weight)
    result: Tensor = torch.ops.shoestring.lora_weight_norm(
        weight, absmax, nested, lora_A, lora_B, scaling=scaling, quant_type=quant_type, block_size=block_size
    )
    return result

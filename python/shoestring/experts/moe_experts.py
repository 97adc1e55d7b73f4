"""The MLPs of a mixture of experts."""

from typing import Literal

import torch
from torch import Tensor

__all__ = ["moe_experts"]


def moe_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Literal["silu", "gelu", "gelu_tanh", "swigluoai"] = "silu",
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return for each token the weighted sum of the MLPs of its experts.

    The result of a token is the sum over its experts e of ``weight_e * (a @ down[e].T + down_bias[e])`` with
    ``a = activation(g) * u``, where g and u are the halves of ``x @ gate_up[e].T + gate_up_bias[e]``.

    Rows of x are gathered while products read them, and results are added to their tokens as they are computed: no
    tensor has the features of x for each token and expert. Backward keeps x and the inputs of the gates, and computes
    the gradient of ``weight`` from these (SonicMoE, arXiv 2512.14080). Results do not depend on the number of threads.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        index: (..., top_k), int64: the experts of each token, as :func:`moe_route` returns them; -1 is no expert. A
            token has an expert at most once.
        weight: (..., top_k): the weights of the experts.
        gate_up: (experts, 2 hidden, features), the stacked weights of gate and up.
        down: (experts, features, hidden).
        gate_up_bias: (experts, 2 hidden).
        down_bias: (experts, features).
        activation: "silu", "gelu", "gelu_tanh", or "swigluoai", which is ``g * sigmoid(1.702 g) * (u + 1)`` (gpt-oss).
        limit: a number to which g is clamped from above, and u in absolute value.
        interleaved: whether g is at even and u at odd features, else g is the first half.
        transposed: whether gate_up has shape (experts, features, 2 hidden) and down (experts, hidden, features).
        dtype: dtype to which operands are rounded, and that of the result; by default that of x, which the weights and
            biases then must have, too. Autocast sets it.

    Returns:
        A tensor with the shape of x.

    Raises:
        RuntimeError: shapes, dtypes or options do not fit, or on the CPU an index is outside of [-1, experts).

    Example:
        >>> x, router = torch.randn(10, 16), torch.randn(16, 4)
        >>> gate_up, down = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
        >>> route = shoestring.moe_route(x @ router, 2, renormalize=True)
        >>> shoestring.moe_experts(x, route.index, route.weight, gate_up, down).shape
        torch.Size([10, 16])
    """
    result: Tensor = torch.ops.shoestring.moe_experts(
        x,
        index,
        weight,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        limit=limit,
        interleaved=interleaved,
        transposed=transposed,
        dtype=dtype,
    )
    return result

"""The MLPs of a mixture of experts."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shoestring.adapters.experts import LowRankSum
from shoestring.layers.seeded_dropout import draw_seed
from shoestring.quantization.quantized_tensor import QuantizedTensor

__all__ = ["ExpertLora", "moe_experts"]


class ExpertLora(NamedTuple):
    """LoRA of the stacks of :func:`moe_experts`: the weight of expert e is ``W[e] + scaling * b[e] @ a[e]``.

    The products of a and b are never computed. A stack whose a and b are None has no LoRA. Tensors have any
    floating-point dtype, and all of them have gradients. The shapes are the same for transposed stacks.

    gate_up_a: (experts, rank, features).
    gate_up_b: (experts, 2 hidden, rank).
    down_a: (experts, rank, hidden), where the rank may be another one.
    down_b: (experts, features, rank).
    scaling: the factor of both.
    dropout: the probability with which an element of what a reads is dropped: of x, with one mask for all experts of a
        token, and of the gated features. The others are divided by 1 - dropout.
    seed: with dropout, one int64 on the device of x, which decides the masks, as of :func:`seeded_dropout`.

    Example:
        >>> x, stacks = torch.randn(10, 16), (torch.randn(4, 24, 16), torch.randn(4, 16, 12))
        >>> route = shoestring.moe_route(torch.randn(10, 4), 2)
        >>> a, b = (torch.randn(*size, requires_grad=True) for size in ((4, 8, 16), (4, 24, 8)))
        >>> lora = shoestring.ExpertLora(gate_up_a=a, gate_up_b=b, scaling=2.0)
        >>> shoestring.moe_experts(x, route.index, route.weight, *stacks, lora=lora).sum().backward()
        >>> a.grad.shape, b.grad.shape
        (torch.Size([4, 8, 16]), torch.Size([4, 24, 8]))
    """

    gate_up_a: Tensor | None = None
    gate_up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0
    seed: Tensor | None = None


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
    lora: ExpertLora | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return for each token the weighted sum of the MLPs of its experts.

    The result of a token is the sum over its experts e of ``weight_e * (a @ down[e].T + down_bias[e])`` with
    ``a = activation(g) * u``, where g and u are the halves of ``x @ gate_up[e].T + gate_up_bias[e]``.

    Rows of x are gathered while products read them, and results are added to their tokens as they are computed: no
    tensor has the features of x for each token and expert. Backward keeps x and the inputs of the gates, and computes
    the gradient of ``weight`` from these (SonicMoE, arXiv 2512.14080). Results do not depend on the number of threads.

    A stack may be a frozen :class:`QuantizedTensor`. Products on the CPU decode its codes while they read them, in forward
    and in backward; on a GPU, some experts are decoded at a time. No dense stack is in memory.

    Args:
        x: (..., features), fp32, fp64, bf16 or fp16.
        index: (..., top_k), int64: the experts of each token, as :func:`moe_route` returns them; -1 is no expert. A
            token has an expert at most once.
        weight: (..., top_k): the weights of the experts.
        gate_up: (experts, 2 hidden, features), the stacked weights of gate and up; dense, or from
            :func:`quantize_4bit` or :func:`quantize_int8`. The matrix of an expert must be a number of whole blocks of
            codes, and both stacks have one format.
        down: (experts, features, hidden), dense or quantised.
        gate_up_bias: (experts, 2 hidden).
        down_bias: (experts, features).
        activation: "silu", "gelu", "gelu_tanh", or "swigluoai", which is ``g * sigmoid(1.702 g) * (u + 1)`` (gpt-oss).
        limit: a number to which g is clamped from above, and u in absolute value.
        interleaved: whether g is at even and u at odd features, else g is the first half.
        transposed: whether gate_up has shape (experts, features, 2 hidden) and down (experts, hidden, features).
        lora: low-rank updates of the stacks, see :class:`ExpertLora`.
        dtype: dtype to which operands are rounded, and that of the result; by default that of x, which dense weights and
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
    stacks = {"gate_up": gate_up, "down": down}
    codes = {name: t for name, t in stacks.items() if isinstance(t, QuantizedTensor)}
    result: Tensor = torch.ops.shoestring.moe_experts(
        x,
        index,
        weight,
        codes["gate_up"].packed if "gate_up" in codes else gate_up,
        codes["down"].packed if "down" in codes else down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        limit=limit,
        interleaved=interleaved,
        transposed=transposed,
        dtype=dtype,
        **_scales(x.shape[-1], stacks, codes, transposed),
        **({} if lora is None else lora._asdict()),
    )
    return result


def run_stacks(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor | LowRankSum,
    down: Tensor | LowRankSum,
    *,
    transposed: bool,
    **options: Any,
) -> Tensor:
    """Return :func:`moe_experts` of stacks that may have adapters, with its options."""
    factors: dict[str, Tensor] = {}
    bases, dropout = [], 0.0
    for name, stack in (("gate_up", gate_up), ("down", down)):
        if isinstance(stack, LowRankSum):
            # left @ right is added to the stack, so to the transpose of each weight if that is what the stack has
            a, b = (stack.left.mT, stack.right.mT) if transposed else (stack.right, stack.left)
            factors |= {f"{name}_a": a, f"{name}_b": b}
            dropout, stack = stack.dropout, stack.base
        bases.append(stack)
    lora = None
    if factors:
        seed = draw_seed(x) if dropout > 0 else None
        lora = ExpertLora(**factors)._replace(dropout=dropout, seed=seed)  # type: ignore[arg-type]
    return moe_experts(x, index, weight, bases[0], bases[1], transposed=transposed, lora=lora, **options)


def _scales(
    features: int, stacks: dict[str, Tensor], codes: dict[str, QuantizedTensor], transposed: bool
) -> dict[str, Any]:
    """Return the arguments of the operator for quantised stacks, by the names of the stacks."""
    if not codes:
        return {}
    # int8 has a scale for each row
    formats = {(t.quant_type, 64 if t.quant_type == "int8" else t.block_size) for t in codes.values()}
    if len(formats) > 1:
        raise RuntimeError(
            "moe_experts: down: expected the quant_type and block_size of gate_up, received "
            f"{codes['down'].quant_type} in blocks of {codes['down'].block_size}; quantise both stacks alike"
        )
    experts, hidden = stacks["gate_up"].shape[0], stacks["gate_up"].shape[2 if transposed else 1] // 2
    ((quant_type, block_size),) = formats
    scales: dict[str, Any] = {"quant_type": quant_type, "block_size": block_size}
    for name, shape in (("gate_up", [2 * hidden, features]), ("down", [features, hidden])):
        if name not in codes:
            continue
        # The operator sees codes, which may be flat.
        expected = [experts, *(reversed(shape) if transposed else shape)]
        if [*codes[name].shape] != expected:
            raise RuntimeError(
                f"moe_experts: {name}: expected shape {expected}, received {[*codes[name].shape]}"
            )
        scales |= {f"{name}_absmax": codes[name].absmax, f"{name}_nested": codes[name].nested}
    return scales | ({"hidden_features": hidden} if "gate_up" in codes else {})

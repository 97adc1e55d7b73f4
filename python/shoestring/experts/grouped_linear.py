"""Linear layers of experts: the rows of each expert are multiplied by its own weight."""

import torch
from torch import Tensor

__all__ = ["grouped_linear"]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows of x by the weights of their experts, in one call for all experts.

    Row s of the result is ``x[rows[s]] @ weight[e].T + bias[e]`` for the expert e with
    ``offsets[e] <= s < offsets[e + 1]``. Slots in front of ``offsets[0]`` and from ``offsets[-1]`` on have no expert:
    their rows of the result are 0, and they give no gradient. ``x[rows]`` is not copied: the product reads the rows
    where they are, and backward adds the gradients of equal rows in the order of the slots.

    Products are added in fp32 (fp64 for fp64), and 16-bit results are rounded once. With ``dtype``, the operands are
    rounded to this dtype before they are multiplied. Autocast sets ``dtype``. Each gradient has the dtype of its
    tensor. The weight of an expert without slots has a gradient of zeros. Results do not depend on the number of
    threads.

    Args:
        x: (tokens, in_features), fp32, fp64, bf16 or fp16.
        weight: (experts, out_features, in_features), in the dtype of x, or in any of these dtypes if ``dtype`` is
            given. A stack of transposed weights, ``stack.mT`` of a stack (experts, in_features, out_features), is
            copied first.
        offsets: (experts + 1), int64, ascending: where the slots of each expert begin, such as those of
            :func:`moe_sort`.
        rows: (slots), int64: the row of x of each slot, for example ``order // top_k`` with the order of
            :func:`moe_sort`. A row may occur several times, or never. None: slot s is row s of x.
        bias: (experts, out_features), like the weight.
        dtype: dtype of the operands and of the result. None: the dtype of x.

    Returns:
        (slots, out_features), or (tokens, out_features) without ``rows``. Differentiable once with respect to x, the
        weight and the bias.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, or on the CPU the offsets do not ascend from 0 to the number
            of slots, or ``rows`` names a row that x does not have.

    Example:
        >>> x, index = torch.randn(3, 4), torch.tensor([[2, 0], [0, 1], [2, 1]])
        >>> weight = torch.randn(3, 5, 4, requires_grad=True)
        >>> order, inverse, offsets = shoestring.moe_sort(index, 3)
        >>> y = shoestring.grouped_linear(x, weight, offsets, rows=order // 2)
        >>> torch.allclose(y[inverse][1], weight[0] @ x[0], atol=1e-6)  # slot 1: the second expert of token 0
        True
        >>> y.sum().backward()

    Reference:
        Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts (arXiv 2211.15841).
    """
    result: Tensor = torch.ops.shoestring.grouped_linear(
        x, weight, offsets, rows=rows, bias=bias, dtype=dtype
    )
    return result

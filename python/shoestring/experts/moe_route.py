"""The router of a mixture of experts: the choice of experts for each token, their weights and the losses."""

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.kept_calls import kept_call

__all__ = ["MoeRoute", "moe_route"]


class MoeRoute(NamedTuple):
    """The experts of each token, their weights, and the losses that balance the experts.

    index: (..., top_k), int64: the chosen experts, the best first; -1 for tokens that the mask leaves out.
    weight: (..., top_k), the dtype of the logits: the weights of the chosen experts; 0 for tokens that the mask
        leaves out. Differentiable.
    counts: (experts), int64: the number of tokens of each expert. Tokens that the mask leaves out do not count.
    balance: the load-balancing loss, of shape (), fp32, or fp64 for fp64 logits. Differentiable.
    z: the z-loss, with the shape and dtype of ``balance``. Differentiable.

    Example:
        >>> route = shoestring.moe_route(torch.randn(10, 8), 2)
        >>> route.index.shape, route.counts.sum()
        (torch.Size([10, 2]), tensor(20))
    """

    index: Tensor  # type: ignore[assignment]  # instead of the method of tuples
    weight: Tensor
    counts: Tensor
    balance: Tensor
    z: Tensor


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    mask: Tensor | None = None,
) -> MoeRoute:
    """Choose ``top_k`` of the experts for each token, with their weights and the losses of the choice.

    Scores, weights and losses are computed in fp32 (fp64 for fp64), also under autocast. Equal scores rank by the lowest
    index, so equal logits always give the same choice. Without ``bias`` and groups, experts are chosen by their
    logits, which have the order of the scores and are not rounded. Results are bitwise repeatable and do not depend
    on the number of threads. :func:`checkpoint` keeps them, so that a recomputation makes the same choice.

    With n the number of tokens that count, f = counts / n and P the mean of the tokens' shares, the losses are

    - ``balance``: experts * sum(f * P), as in Switch Transformer (arXiv 2101.03961) and as
      ``load_balancing_loss_func`` in transformers. It is ``top_k`` where all experts have equally many tokens.
      The shares of a token are the softmax of its logits, or with "sigmoid" its sigmoids divided by their sum
      (DeepSeek-V3, arXiv 2412.19437).
    - ``z``: the mean of the squared log-sum-exp of a token's logits (ST-MoE, arXiv 2202.08906).

    Both are 0 where no token counts. Multiply them by their coefficients and add them to the loss of the model.

    Args:
        logits: (..., experts), fp32, fp64, bf16 or fp16; at most 2048 experts. NaN ranks above all numbers, and
            makes the weights and losses NaN.
        top_k: number of experts of a token.
        score: "softmax": the weights are the probabilities of the chosen experts (Mixtral, Qwen3, OLMoE).
            "sigmoid": the weights are the sigmoids of the logits (DeepSeek-V3, GLM-4.5). "topk_softmax": the
            weights are the softmax of the chosen logits alone (gpt-oss).
        bias: (experts), any floating-point dtype: added to the scores for the choice alone, to balance the
            experts without a loss (arXiv 2408.15664). It has no gradient, and the weights are those without it.
        renormalize: divide the weights of a token by their sum (``norm_topk_prob`` in transformers). Changes
            nothing for "topk_softmax".
        groups, top_groups: experts are chosen from the ``top_groups`` of ``groups`` groups of neighbouring
            experts with the largest sum of their two best scores (``n_group`` and ``topk_group`` in transformers).
        scale: factor of the weights (``routed_scaling_factor`` in transformers).
        mask: (...), bool: True for the tokens that count. Others have index -1, weight 0 and no gradient, and do
            not enter counts and losses.

    Returns:
        index, weight, counts, balance and z. Differentiable once with respect to the logits.

    Raises:
        RuntimeError: an argument does not fit the logits, score is unknown, or the groups have too few experts.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 2.0, 0.0]], requires_grad=True)
        >>> route = shoestring.moe_route(logits, 2, renormalize=True)
        >>> route.index, route.weight.detach()
        (tensor([[0, 2]]), tensor([[0.5000, 0.5000]]))
        >>> (0.01 * route.balance + 0.001 * route.z).backward()
    """
    return MoeRoute(
        *kept_call(
            lambda: torch.ops.shoestring.moe_route(
                logits,
                top_k,
                score=score,
                bias=bias,
                renormalize=renormalize,
                groups=groups,
                top_groups=top_groups,
                scale=scale,
                mask=mask,
            )
        )
    )

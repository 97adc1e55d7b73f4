"""The operators of experts in plain PyTorch."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring import seeded_dropout


def first_largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest elements of the last dimension, the lowest first among equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def moe_route_reference(
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
) -> tuple[Tensor, ...]:
    """Return index, weight, counts, balance and z, computed in fp32 or fp64 as the routers of transformers do."""
    experts = logits.shape[-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid(), "topk_softmax": wide}[score]
    key = scores if bias is None else scores + bias.detach().to(wide.dtype)
    if top_groups < groups:
        grouped = key.unflatten(-1, (groups, experts // groups))
        best = grouped.topk(min(2, experts // groups), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, first_largest(best, top_groups), True)
        key = key.masked_fill(~kept.repeat_interleave(experts // groups, -1), -torch.inf)
    index = first_largest(key.detach(), top_k)
    weight = scores.gather(-1, index)
    if score == "topk_softmax":
        weight = weight.softmax(-1)
    elif renormalize:
        weight = weight / (weight.sum(-1, keepdim=True) + (1e-20 if score == "sigmoid" else 0))
    counted = logits.new_ones(logits.shape[:-1], dtype=torch.bool) if mask is None else mask
    weight = (weight * scale).to(logits.dtype).masked_fill(~counted.unsqueeze(-1), 0)
    counts = torch.bincount(index[counted].flatten(), minlength=experts)
    tokens = max(int(counted.sum()), 1)
    shares = scores / scores.sum(-1, keepdim=True) if score == "sigmoid" else wide.softmax(-1)
    balance = experts * (counts.to(wide.dtype) / tokens * shares[counted].sum(0) / tokens).sum()
    z = wide[counted].logsumexp(-1).square().sum() / tokens
    return index.masked_fill(~counted.unsqueeze(-1), -1), weight, counts, balance, z


def grouped_linear_reference(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``grouped_linear`` in plain PyTorch: a linear layer for each expert, and zeros without an expert."""
    dtype = dtype or x.dtype
    given = (x if rows is None else x[rows]).to(dtype)
    bounds = offsets.tolist()
    parts = [
        F.linear(given[first:last], weight[e].to(dtype), None if bias is None else bias[e].to(dtype))
        for e, (first, last) in enumerate(itertools.pairwise(bounds))
    ]
    y = torch.cat([given.new_zeros(0, weight.shape[1]), *parts])
    return F.pad(y, (0, 0, bounds[0], len(given) - bounds[-1]))


def gated(hidden: Tensor, activation: str, limit: float | None, interleaved: bool) -> Tensor:
    """Return the gated features of experts, in the rounding steps of the models of transformers."""
    g, u = (hidden[..., ::2], hidden[..., 1::2]) if interleaved else hidden.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swigluoai":
        return (u + 1) * (g * torch.sigmoid(1.702 * g))
    if activation == "silu":
        return F.silu(g) * u
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none") * u


def moe_experts_reference(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``moe_experts`` in plain PyTorch as transformers does by default: a loop over experts, and index_add.

    LoRA is computed as PEFT does: a product with ``a``, then one with ``b``, which is scaled. Dropout has masks of
    ``seeded_dropout``: one for the tokens, and one for the slots in the order of ``moe_sort``.
    """
    dtype = dtype or x.dtype
    rows, places, factors = x.flatten(0, -2).to(dtype), index.flatten(0, -2), weight.flatten(0, -2)
    y = torch.zeros_like(rows)
    dropped, kept = rows, None
    if seed is not None:
        hidden = down.shape[1 if transposed else 2]
        dropped = rows * seeded_dropout(torch.ones_like(rows), dropout, seed=seed)
        sorted_slots = places.masked_fill(places < 0, len(gate_up)).flatten().argsort(stable=True)
        masks = seeded_dropout(rows.new_ones(places.numel(), hidden), dropout, seed=seed + 1)
        kept = torch.empty_like(masks).index_copy(0, sorted_slots, masks).view(*places.shape, hidden)
    for e in range(len(gate_up)):
        first, second = ((w[e] if transposed else w[e].t()).to(dtype) for w in (gate_up, down))
        first_bias, second_bias = (0 if b is None else b[e].to(dtype) for b in (gate_up_bias, down_bias))
        token, place = (places == e).nonzero(as_tuple=True)

        def update(rows: Tensor, a: Tensor | None, b: Tensor | None, e: int = e) -> Tensor | float:
            return 0.0 if a is None or b is None else rows @ a[e].t().to(dtype) @ b[e].t().to(dtype) * scaling

        h = rows[token] @ first + first_bias + update(dropped[token], gate_up_a, gate_up_b)
        a = gated(h, activation, limit, interleaved)
        y_e = a @ second + second_bias + update(a if kept is None else a * kept[token, place], down_a, down_b)
        y = y.index_add(0, token, y_e * factors[token, place, None].to(dtype))
    return y.view(x.shape)

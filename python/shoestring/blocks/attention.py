"""Multi-head attention between its projections."""

from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.together import forward_together
from shoestring.attention.attention import attention
from shoestring.layers.norm_module import RMSNorm
from shoestring.layers.rope import rope
from shoestring.layers.seeded_dropout import draw_seed


class Attention(nn.Module):
    """Queries, keys and values projected, heads normalised and rotated, ``shoestring.attention``, a projection back.

    Its state_dict has transformers' names: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and where there are such
    ``q_norm``, ``k_norm``, ``sinks``, so that the attention of Llama, Mistral, Qwen 2 and 3, Gemma, gpt-oss loads.
    Projections begin as ``nn.Linear`` does. Where those of one input are frozen, with adapters or quantised, they are
    one ``lora_linear_group``.

    Args:
        features: of the input and of the result.
        num_heads: of the queries.
        num_kv_heads: of keys and values, a divisor of num_heads (grouped queries); None: num_heads.
        head_dim: features of a head of queries and keys; None: ``features / num_heads``.
        value_dim: of a head of values; None: head_dim.
        source_features: of what keys and values are made of, in cross-attention; None: features.
        bias, out_bias: whether ``q_proj``, ``k_proj`` and ``v_proj`` have a bias, and whether ``o_proj`` has.
        causal, window, softcap, scale: as in ``shoestring.attention``.
        qk_norm: RMSNorm of each head of queries and keys, before the rotation and in one pass with it; what is between
            the two is fp32.
        norm_eps, norm_offset: that norm's, as in ``shoestring.rms_norm``: Gemma's offset is 1.
        rotary_dim, interleaved: as in ``shoestring.rope``.
        sinks: whether each head has a learned sink, ``sinks`` (num_heads), zeros to begin with.
        dropout_p: the probability with which a probability is dropped, in training alone.
        device, dtype: of the parameters.

    Raises:
        ValueError: sizes that do not go together.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        source_features: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        sinks: bool = False,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"nn.Attention: num_kv_heads: expected a divisor of num_heads, {num_heads}, received {num_kv_heads}"
            )
        if head_dim is None and features % num_heads:
            raise ValueError(
                f"nn.Attention: head_dim: expected a number, as {features} features do not divide by {num_heads} "
                "heads, received None"
            )
        if not 0 <= dropout_p < 1:
            raise ValueError(f"nn.Attention: dropout_p: expected a number in [0, 1), received {dropout_p}")
        self.features, self.num_heads, self.num_kv_heads = features, num_heads, num_kv_heads
        self.head_dim = features // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.source_features = features if source_features is None else source_features
        self.causal, self.window, self.softcap, self.scale = causal, window, softcap, scale
        self.norm_eps, self.norm_offset = norm_eps, norm_offset
        self.rotary_dim, self.interleaved, self.dropout_p = rotary_dim, interleaved, dropout_p
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(features, num_heads * self.head_dim, bias, **where)
        self.k_proj = nn.Linear(self.source_features, num_kv_heads * self.head_dim, bias, **where)
        self.v_proj = nn.Linear(self.source_features, num_kv_heads * self.value_dim, bias, **where)
        self.o_proj = nn.Linear(num_heads * self.value_dim, features, out_bias, **where)
        norm: dict[str, Any] = {"eps": norm_eps, "offset": norm_offset, **where}
        self.q_norm = RMSNorm(self.head_dim, **norm) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, **norm) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads, **where)) if sinks else None

    def reset_parameters(self) -> None:
        """The first values of ``sinks``, which no layer below has."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        position_ids: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Attention of x's tokens to each other or, with a source, to that one's.

        Args:
            x: (batch, tokens, features), or with cu_seqlens_q packed, (tokens of all sequences, features).
            source: (batch, keys, source_features); packed, with cu_seqlens_k, (keys of all, source_features).
            cos, sin, position_ids: as in ``shoestring.rope``; without cos and sin no rotation. Not with a source.
            bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k: as in ``shoestring.attention``.

        Returns:
            x's shape, in the dtype of the projections.

        Raises:
            ValueError: an x, a source or tables that do not go with the module.
            RuntimeError: what the operators refuse.
        """
        self._check(x, source, cos, sin, position_ids, cu_seqlens_q)
        if source is None:
            q, k, v = forward_together(x, [self.q_proj, self.k_proj, self.v_proj])
        else:
            q, (k, v) = self.q_proj(x), forward_together(source, [self.k_proj, self.v_proj])
        q, k = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))
        weights: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None:
            if cos is None:
                q, k = self.q_norm(q), self.k_norm(k)
            weights = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight}
            weights |= {"eps": self.norm_eps, "offset": self.norm_offset}
        if cu_seqlens_q is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cos is not None and sin is not None:
            q, k = rope(
                q,
                k,
                cos,
                sin,
                rotary_dim=self.rotary_dim,
                interleaved=self.interleaved,
                position_ids=position_ids,
                **weights,
            )
        dropout: dict[str, Any] = (
            {"dropout_p": self.dropout_p, "seed": draw_seed(x)}
            if self.training and self.dropout_p > 0
            else {}
        )
        out: Tensor = attention(
            q, k, v, causal=self.causal, window=self.window, softcap=self.softcap, scale=self.scale, sinks=self.sinks,
            bias=bias, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **dropout,
        )  # fmt: skip
        result: Tensor = self.o_proj((out if cu_seqlens_q is not None else out.transpose(1, 2)).flatten(-2))
        return result

    def _check(
        self, x: Tensor, source: Tensor | None, cos: Tensor | None, sin: Tensor | None, position_ids: Tensor | None,
        cu_seqlens_q: Tensor | None,
    ) -> None:  # fmt: skip
        batch = "(batch, " if cu_seqlens_q is None else "("
        dims = 3 if cu_seqlens_q is None else 2
        if x.ndim != dims or x.shape[-1] != self.features:
            packed = "" if cu_seqlens_q is None else " with cu_seqlens_q"
            expected = f"{batch}tokens, {self.features}){packed}"
            raise ValueError(f"nn.Attention: x: expected {expected}, received {tuple(x.shape)}")
        given = x if source is None else source
        if given.ndim != dims or given.shape[-1] != self.source_features:
            raise ValueError(
                f"nn.Attention: source: expected {batch}keys, {self.source_features}), received "
                + (f"none, and x of {self.features} features" if source is None else f"{tuple(given.shape)}")
            )
        if (cos is None) != (sin is None) or (cos is None and position_ids is not None):
            raise ValueError(
                "nn.Attention: cos and sin: expected both, or neither and no position_ids, received other"
            )
        if source is not None and cos is not None:
            raise ValueError(
                "nn.Attention: cos: expected None with a source, as queries and keys have other positions, received "
                "a table"
            )

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{self.features}, {heads}, causal={self.causal}"

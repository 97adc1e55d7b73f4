"""Define a module of multi-head attention with its projections."""

from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.together import forward_together, project
from shoestring.attention.attention import attention
from shoestring.layers.norm_module import RMSNorm
from shoestring.layers.rope import rope
from shoestring.layers.seeded_dropout import draw_seed


class Attention(nn.Module):
    """Multi-head attention with projections, and optionally RMSNorm and rotary embedding of each head.

    Its state_dict has the names of transformers: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and, if
    used, ``q_norm``, ``k_norm`` and ``sinks``. It therefore loads the attention of Llama, Mistral, Qwen 2 and
    3, Gemma and gpt-oss. Projections are initialised like ``nn.Linear``. If projections that have the same
    input are frozen and have adapters or quantised weights, one call of ``lora_linear_group`` computes them.
    This package computes dense projections on CPUs where its products are faster, else PyTorch does.

    Args:
        features: size of the last dimension of the input and the output.
        num_heads: number of heads of the queries.
        num_kv_heads: number of heads of the keys and values, a divisor of num_heads (grouped-query
            attention). None: num_heads.
        head_dim: features of a head of queries and keys. None: ``features / num_heads``.
        value_dim: features of a head of values. None: head_dim.
        source_features: size of the last dimension of ``source``, from which cross-attention projects keys
            and values. None: features.
        bias: whether ``q_proj``, ``k_proj`` and ``v_proj`` have a bias.
        out_bias: whether ``o_proj`` has a bias.
        causal, window_size, softcap, scale: as in ``shoestring.attention``.
        qk_norm: whether RMSNorm is applied to each head of queries and keys, before the rotary embedding. If
            there is a rotary embedding, one pass computes both, without rounding the fp32 result in between.
        norm_eps, norm_offset: arguments of the RMSNorm of queries and keys, as in ``shoestring.rms_norm``;
            Gemma has offset 1.
        rotary_dim, interleaved: as in ``shoestring.rope``.
        sinks: whether each head has a trainable sink. The parameter ``sinks`` (num_heads) starts as zeros.
        dropout_p: probability that an attention weight is dropped, in training only.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the sizes are not consistent, or dropout_p is outside [0, 1).

    Example:
        >>> layer = shoestring.nn.Attention(256, 8, num_kv_heads=2, causal=True)
        >>> angles = torch.outer(torch.arange(16), 10000 ** (-torch.arange(0, 32, 2) / 32))
        >>> layer(torch.randn(1, 16, 256), cos=angles.cos(), sin=angles.sin()).shape
        torch.Size([1, 16, 256])
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
        window_size: tuple[int, int] | None = None,
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
        self.causal, self.window_size, self.softcap, self.scale = causal, window_size, softcap, scale
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
        """Initialise ``sinks``, the only parameter that does not belong to a submodule."""
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
        """Compute self-attention of the tokens of x or, if ``source`` is given, cross-attention to it.

        Args:
            x: (batch, tokens, features), or packed, with cu_seqlens_q, (tokens of all sequences, features).
            source: (batch, keys, source_features), or packed, with cu_seqlens_k, (keys of all sequences,
                source_features).
            cos, sin, position_ids: as in ``shoestring.rope``. Without cos and sin there is no rotary
                embedding. They are not allowed with ``source``.
            bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k: as in ``shoestring.attention``.

        Returns:
            The shape of x, in the dtype of the projections.

        Raises:
            ValueError: x, source, cos or sin does not fit the module.
            RuntimeError: another argument does not fit the operators.
        """
        self._check(x, source, cos, sin, position_ids, cu_seqlens_q)
        if source is None:
            q, k, v = forward_together(x, [self.q_proj, self.k_proj, self.v_proj])
        else:
            q, (k, v) = project(x, self.q_proj), forward_together(source, [self.k_proj, self.v_proj])
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
            q, k, v, causal=self.causal, window_size=self.window_size, softcap=self.softcap, scale=self.scale, sinks=self.sinks,
            bias=bias, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **dropout,
        )  # fmt: skip
        return project((out if cu_seqlens_q is not None else out.transpose(1, 2)).flatten(-2), self.o_proj)

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
        kv = x if source is None else source
        if kv.ndim != dims or kv.shape[-1] != self.source_features:
            raise ValueError(
                f"nn.Attention: source: expected {batch}keys, {self.source_features}), received "
                + (f"none, and x of {self.features} features" if source is None else f"{tuple(kv.shape)}")
            )
        if (cos is None) != (sin is None) or (cos is None and position_ids is not None):
            raise ValueError(
                "nn.Attention: cos and sin: expected both tables, or neither and no position_ids; received "
                "cos or sin alone, or position_ids without them"
            )
        if source is not None and cos is not None:
            raise ValueError(
                "nn.Attention: cos: expected None with a source, since queries and keys have different "
                "positions; received a table"
            )

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{self.features}, {heads}, causal={self.causal}"

"""Mixture of Depths: a block that computes a few tokens of each sequence, as a module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.kept_calls import kept_choice
from shoestring.core.module_argument import check_module
from shoestring.experts.router_module import is_recomputed

SCORES = ("linear", "sigmoid")
CHOICES = ("auto", "top_k", "predictor")
# The arguments of decoder layers of transformers and of nn.Attention that depend on the tokens.
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k")
LENGTHS = ("max_length_q", "max_length_k")
CACHES = ("past_key_values", "past_key_value")


class DepthRoute(NamedTuple):
    """The tokens that a block has computed, their weights, and the loss of the predictor.

    index: (chosen), int64: the chosen rows of x, viewed as (tokens, features), in ascending order.
    offsets: (sequences + 1), int64: the chosen rows of sequence s are ``index[offsets[s]:offsets[s + 1]]``.
    weight: (chosen), fp32, or fp64 if x or the weight of the router is: the weights of the router. Differentiable.
    loss: the loss of the predictor, of shape (), in the dtype of ``weight``. Differentiable.

    Example:
        >>> mod = shoestring.nn.MixtureOfDepths(shoestring.nn.GatedMLP(8, 16), 8, capacity=0.25)
        >>> y = mod(torch.randn(2, 12, 8))
        >>> mod.route.offsets, mod.route.weight.shape
        (tensor([0, 3, 6]), torch.Size([6]))
    """

    index: Tensor  # type: ignore[assignment]  # instead of the method of tuples
    offsets: Tensor
    weight: Tensor
    loss: Tensor


class MixtureOfDepths(nn.Module):
    """A block that computes a share of the tokens of each sequence; the others pass unchanged (arXiv 2404.02258).

    A linear router gives each token a weight r. The ``capacity`` of a sequence's tokens with the largest weights are
    chosen, at least one token, and of equal weights those with the lowest index. With B the block applied to the
    sequence of the chosen tokens alone, a chosen token becomes ``x + r (B(x) - x)``. So the gradient reaches the router.

    The choice of a token depends on later tokens. A generating model does not know these, so a second linear layer, the
    predictor, learns from x which tokens are chosen. Add ``route.loss``, its binary cross-entropy, to the loss of the
    model. It has no gradient but that of the predictor. In eval mode the predictor chooses. Then no result of a causal
    block depends on later tokens.

    The chosen tokens keep their positions. The module takes the place of a decoder layer of transformers. Arguments of
    the block for all tokens are reduced to those of the chosen tokens (see :meth:`forward`). :func:`checkpoint` keeps
    the choice, so that a recomputation computes the same tokens.

    Args:
        block: maps (sequences, tokens, features) to the same shape, with its residual connections.
        features: size of the last dimension of the input.
        capacity: share of the tokens of a sequence, above 0 and at most 1. Its product with the number of tokens is
            rounded to the nearest number, and is at least 1.
        score: "linear": r is the output of the router, as in the paper. "sigmoid": its sigmoid.
        choice: "auto": the largest weights are chosen in training mode, and the predictor chooses in eval mode.
            "top_k", "predictor": one of both always.
        device, dtype: device and dtype of router and predictor, which are initialised like ``nn.Linear``. None: those of
            the first parameter of the block.

    Attributes:
        router: (features), a parameter.
        predictor: (features), a parameter.
        predictor_bias: (1), a parameter.
        route: the :class:`DepthRoute` of the last forward. Recomputed forwards do not change it.

    Raises:
        ValueError: an option does not fit.
        TypeError: the block is no module.

    Example:
        >>> mod = shoestring.nn.MixtureOfDepths(shoestring.nn.GatedMLP(16, 24), 16, capacity=0.5)
        >>> y = mod(torch.randn(4, 10, 16))
        >>> (y.square().mean() + 0.01 * mod.route.loss).backward()
        >>> mod.route.index.shape, mod.router.grad.shape
        (torch.Size([20]), torch.Size([16]))
    """

    route: DepthRoute | None = None

    def __init__(
        self,
        block: nn.Module,
        features: int,
        capacity: float = 0.125,
        *,
        score: str = "linear",
        choice: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_module("nn.MixtureOfDepths", block)
        if features < 1:
            raise ValueError(f"nn.MixtureOfDepths: features: expected a number above 0, received {features}")
        if not 0 < capacity <= 1:
            raise ValueError(
                f"nn.MixtureOfDepths: capacity: expected a share above 0 and at most 1, received {capacity}"
            )
        for name, value, known in (("score", score, SCORES), ("choice", choice, CHOICES)):
            if value not in known:
                names = ", ".join(map(repr, known))
                raise ValueError(f"nn.MixtureOfDepths: {name}: expected one of {names}, received {value!r}")
        self.features, self.capacity, self.score, self.choice = features, capacity, score, choice
        self.block = block
        if hasattr(block, "attention_type"):  # models of transformers read it from their layers
            self.attention_type = block.attention_type
        first = next(block.parameters(), torch.empty(0))
        device = first.device if device is None else device
        dtype = first.dtype if dtype is None and first.is_floating_point() else dtype
        self.router = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.predictor = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.predictor_bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise router and predictor."""
        bound = self.features**-0.5
        for parameter in (self.router, self.predictor, self.predictor_bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """Compute the chosen tokens.

        Args:
            x: (batch, tokens, features), or one sequence (tokens, features). Packed sequences are (tokens of all
                sequences, features), or (1, tokens of all sequences, features); the offsets of their first tokens are in
                ``cu_seq_lens_q`` or ``cu_seqlens_q``. The host waits for these, as it does for the predictor's choice.
            arguments: arguments of the block. ``position_ids``, ``position_embeddings``, and ``cos`` and ``sin`` without
                position_ids, are reduced to the chosen tokens. So is ``attention_mask``, of (batch, tokens) or (batch,
                heads, tokens, tokens). Offsets and maximal lengths become those of the chosen tokens. Other arguments are
                passed on unless they are tensors.

        Returns:
            The shape and dtype of x. ``route`` has the choice.

        Raises:
            ValueError: x or an argument does not fit, or the block changes the shape.
        """
        bounds = self._bounds(x, arguments)
        flat = x.reshape(-1, self.features)
        by_predictor = self.choice == "predictor" or (self.choice == "auto" and not self.training)
        if by_predictor:
            with torch.no_grad():
                index = kept_choice(
                    lambda: (
                        (self._logits(flat, self.predictor, self.predictor_bias) > 0).nonzero().squeeze(-1)
                    )
                )
            offsets = torch.searchsorted(index, torch.tensor(bounds, device=x.device))
            counts = offsets.diff().tolist()
        else:
            counts = [self._count(end - begin) for begin, end in itertools.pairwise(bounds)]
            with torch.no_grad():
                index = kept_choice(lambda: heaviest_rows(self._logits(flat, self.router), bounds, counts))
            offsets = torch.tensor([0, *itertools.accumulate(counts)], device=x.device)
        rows = flat.index_select(0, index)
        weight = self._logits(rows, self.router)
        weight = weight.sigmoid() if self.score == "sigmoid" else weight
        out = self._run(rows, index, counts, x.shape, arguments)
        mixed = rows + weight.unsqueeze(-1) * (out - rows)
        loss = weight.new_zeros(()) if by_predictor else self._loss(flat.detach(), index)
        if not is_recomputed():
            self.route = DepthRoute(index, offsets, weight, loss)
        return flat.index_copy(0, index, mixed.to(x.dtype)).view(x.shape)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.mv(x.to(dtype), weight.to(dtype))
            return logits if bias is None else logits + bias

    def _loss(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the mean binary cross-entropy of the predictor."""
        logits = self._logits(x, self.predictor, self.predictor_bias)
        target = torch.zeros_like(logits).index_fill_(0, index, 1)
        total = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        return total / max(1, logits.numel())

    def _count(self, tokens: int) -> int:
        """Return how many of the tokens of a sequence are chosen."""
        return min(tokens, max(1, math.floor(self.capacity * tokens + 0.5)))

    def _bounds(self, x: Tensor, arguments: dict[str, Any]) -> list[int]:
        """Return the offsets of all sequences in the tokens of x, and their end."""
        if x.dim() not in (2, 3) or x.shape[-1] != self.features:
            raise ValueError(
                f"nn.MixtureOfDepths: x: expected (batch, tokens, {self.features}), or (tokens, {self.features}), received "
                f"{tuple(x.shape)}"
            )
        tokens = math.prod(x.shape[:-1])
        given = [(name, arguments[name]) for name in OFFSETS if arguments.get(name) is not None]
        if not given:
            length = x.shape[-2]
            return list(range(0, tokens + 1, length)) if tokens else [0] * (math.prod(x.shape[:-2]) + 1)
        name, first = given[0]
        if x.dim() == 3 and x.shape[0] != 1:
            raise ValueError(
                f"nn.MixtureOfDepths: {name}: expected None with a batch of {x.shape[0]} sequences; pack them into one row"
            )
        bounds: list[int] = first.tolist()
        if bounds[:1] != [0] or bounds[-1] != tokens or bounds != sorted(bounds):
            raise ValueError(
                f"nn.MixtureOfDepths: {name}: expected ascending offsets from 0 to {tokens}, received {bounds}"
            )
        for other, offsets in given[1:]:
            if offsets is not first and not torch.equal(offsets, first):
                raise ValueError(
                    f"nn.MixtureOfDepths: {other}: expected the offsets of {name}, received {offsets.tolist()}"
                )
        return bounds

    def _run(
        self, rows: Tensor, index: Tensor, counts: list[int], shape: torch.Size, arguments: dict[str, Any]
    ) -> Tensor:
        """Return the results of the block for the chosen rows.

        Sequences with equally many chosen tokens are one batch.
        """
        if any(arguments.get(name) is not None for name in OFFSETS):
            if index.numel() == 0:
                return rows
            lead = (1, index.numel()) if len(shape) == 3 else (index.numel(),)
            return self._call(rows.view(*lead, -1), index, counts, shape, arguments)
        groups = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
        if len(groups) > 1 and any(arguments.get(name) is not None for name in CACHES):
            raise ValueError(
                "nn.MixtureOfDepths: past_key_values: expected None where sequences of a batch have different numbers of "
                f"chosen tokens, received {counts} tokens; generate one sequence at a time, or set use_cache=False"
            )
        parts, begin = [], 0
        for count, sequences in groups:
            end = begin + count * sequences
            if begin < end:
                lead = (sequences, count) if len(shape) == 3 else (count,)
                part = rows[begin:end].view(*lead, -1)
                parts.append(self._call(part, index[begin:end], counts, shape, arguments))
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else rows

    def _call(
        self, x: Tensor, index: Tensor, counts: list[int], shape: torch.Size, arguments: dict[str, Any]
    ) -> Tensor:
        """Return the result of the block for some of the chosen rows, as (rows, features)."""
        of_chosen: dict[str, Callable[..., Any]] = {
            "position_ids": lambda name, t: tokens_of(name, t, index, x, shape, 0),
            "attention_mask": lambda name, t: mask_of(name, t, index, x, shape),
            "position_embeddings": lambda name, t: tuple(tokens_of(name, e, index, x, shape, 1) for e in t),
        }
        if arguments.get("position_ids") is None:  # else cos and sin are tables of all positions
            of_chosen |= dict.fromkeys(("cos", "sin"), lambda name, t: tokens_of(name, t, index, x, shape, 1))
        else:
            of_chosen |= dict.fromkeys(("cos", "sin"), lambda _, t: t)
        lengths = [count for count in counts if count]  # a document without a chosen token is none

        def offsets(_: str, t: Tensor) -> Tensor:
            return torch.tensor([0, *itertools.accumulate(lengths)], dtype=t.dtype, device=t.device)

        of_chosen |= dict.fromkeys(OFFSETS, offsets) | dict.fromkeys(LENGTHS, lambda *_: max(lengths))
        reduced = {}
        for name, value in arguments.items():
            if value is None or name not in of_chosen:
                if isinstance(value, Tensor) and value.dim() > 0:
                    raise ValueError(
                        f"nn.MixtureOfDepths: {name}: expected no such tensor, received one of {tuple(value.shape)}, of "
                        "which the part for the chosen tokens is unknown"
                    )
                reduced[name] = value
            else:
                reduced[name] = of_chosen[name](name, value)
        out = self.block(x, **reduced)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            received = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"nn.MixtureOfDepths: block: expected a result of the shape of its input, {tuple(x.shape)}, received "
                f"{received}"
            )
        return out.reshape(-1, self.features)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "route"}  # has an autograd graph

    def extra_repr(self) -> str:
        return f"{self.features}, capacity={self.capacity}, score={self.score!r}, choice={self.choice!r}"


def heaviest_rows(scores: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
    """Return in ascending order the rows of the largest scores of each sequence, the lowest rows among equals.

    Args:
        scores: (tokens).
        bounds: the offsets of the sequences, and the end.
        counts: the number of rows of each sequence that are returned.
    """
    lengths = torch.tensor(bounds, device=scores.device).diff()
    order = scores.sort(descending=True, stable=True).indices
    sequence = torch.arange(len(counts), device=scores.device).repeat_interleave(lengths)
    order = order[sequence[order].sort(stable=True).indices]
    taken = [torch.arange(begin, begin + count) for begin, count in zip(bounds, counts, strict=False)]
    return order[torch.cat(taken).to(scores.device)].sort().values if taken else order


def tokens_of(name: str, t: Tensor, index: Tensor, x: Tensor, shape: torch.Size, trailing: int) -> Tensor:
    """Return the chosen rows of an argument of all tokens, for the chosen tokens x.

    Args:
        name: of the argument.
        t: (tokens, ...), (1, tokens, ...) or (batch, tokens, ...).
        index: the rows of the chosen tokens.
        shape: of all tokens.
        trailing: number of dimensions besides batch and tokens.
    """
    tokens, lead, rest = shape[-2], tuple(t.shape[: t.dim() - trailing]), t.shape[t.dim() - trailing :]
    if lead in ((tokens,), (1, tokens)):
        chosen = t.reshape(tokens, *rest).index_select(0, index % tokens)
    elif lead == tuple(shape[:-1]):
        chosen = t.flatten(0, 1).index_select(0, index)
    else:
        features = ", features" * trailing
        raise ValueError(
            f"nn.MixtureOfDepths: {name}: expected (1 or batch, tokens{features}) for x of {tuple(shape)}, received "
            f"{tuple(t.shape)}"
        )
    return chosen.view(*x.shape[:-1], *rest)


def mask_of(name: str, mask: Tensor, index: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    """Return the part of an attention mask whose queries and keys are the chosen tokens."""
    tokens = shape[-2]
    if mask.dim() == 2:
        return tokens_of(name, mask, index, x, shape, 0)
    if mask.shape == (1, 1, 1, 0):  # the mask by which transformers gets to know that there is none
        return mask
    if mask.dim() != 4 or mask.shape[0] not in (1, *shape[:-2]) or mask.shape[2:] != (tokens, tokens):
        raise ValueError(
            f"nn.MixtureOfDepths: {name}: expected (batch, tokens), or (1 or batch, heads, tokens, tokens), for x of "
            f"{tuple(shape)}, received {tuple(mask.shape)}"
        )
    position = (index % tokens).view(-1, x.shape[-2])
    row = (index // tokens).view(-1, x.shape[-2])[:, :1, None] if mask.shape[0] > 1 else 0
    return mask[row, :, position[:, :, None], position[:, None, :]].permute(0, 3, 1, 2)

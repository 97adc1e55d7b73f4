"""Define the base class of layers with LoRA or DoRA adapters, and functions on low-rank products."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import AdaptedLayer, wide
from shoestring.adapters.lora_linear import lora_weight_norm
from shoestring.adapters.options import LoraOptions


class Part(NamedTuple):
    """The low-rank product ``scaling * lora_B @ lora_A`` of one adapter."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    # (rows of the batch, 1): 1 if the row uses the adapter, else 0; None: all rows use the adapter.
    uses: Tensor | None


class LowRankLayer(AdaptedLayer):
    """A layer with LoRA or DoRA adapters. Its weight is treated as a matrix (out_features, in_features)."""

    CAN_MIX_ROWS = True
    lora_bias: nn.ParameterDict
    lora_magnitude_vector: nn.ParameterDict

    def factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the base weight and the two low-rank parameters of an adapter, in their stored shapes."""
        raise NotImplementedError

    def matrices(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three tensors of :meth:`factors`, reshaped to matrices.

        Their shapes are (out_features, in_features), (rank, in_features) and (out_features, rank).
        """
        return weight, lora_A, lora_B

    def dense_weight(self) -> Tensor:
        """Return the base weight as a dense matrix (out_features, in_features), in fp32 or fp64."""
        raise NotImplementedError

    def folded(self, matrix: Tensor) -> Tensor:
        """Return a matrix (out_features, in_features) reshaped to the shape of the layer's weight."""
        return matrix

    def part(self, name: str) -> Part:
        """Return the low-rank product of one adapter of this layer, as matrices."""
        _, lora_A, lora_B = self.matrices(*self.factors(name))
        return Part(lora_A, lora_B, self.adapters[name].scaling, None)

    def parts(self, names: Sequence[str], x: Tensor | None = None) -> list[Part]:
        """Return the low-rank products of the adapters ``names``; x is the input of the layer."""
        return [self.part(name) for name in names]

    def composed(
        self, base: Tensor, names: Sequence[str], product: Callable[[str], Tensor], shape: Sequence[int]
    ) -> Tensor:
        """Add the adapters' changes to the output of the base layer, in plain PyTorch.

        Args:
            base: output of the layer without adapters and without its bias.
            names: names of the adapters to add.
            product: function that returns the output of an adapter's low-rank product, given the adapter's
                name. The output is not scaled and has the shape of ``base``.
            shape: shape to which a vector (out_features) is viewed, so that it broadcasts with ``base``.
        """
        total = base
        for name in names:
            options = self.adapters[name]
            change = options.scaling * product(name)
            if options.dora:
                gain = self.gain(name).view(shape)
                change = (gain - 1) * base + gain * change
            if options.lora_bias:
                change = change + options.scaling * self.lora_bias[name].view(shape)
            if self.rows is not None:
                change = change * self.uses(name, base).view(-1, *[1] * (base.dim() - 1))
            total = total + change
        return total.to(base.dtype)

    def dropout_of(self, names: Sequence[str]) -> float:
        chosen = {self.adapters[name].dropout for name in names} if self.training else set()
        if len(chosen) > 1:
            raise ValueError(
                "lora: dropout: expected the same dropout for all active adapters in training, received "
                f"{sorted(chosen)}"
            )
        return chosen.pop() if chosen else 0.0

    def gain(self, name: str) -> Tensor:
        """Return DoRA's magnitude divided by the row norms of the adapted weight, detached from autograd."""
        magnitude: Tensor = self.lora_magnitude_vector[name]
        return magnitude / self.norm(name).to(magnitude.dtype)

    def first_magnitude(self, options: LoraOptions, lora_A: Tensor, lora_B: Tensor) -> Tensor:
        """Return the initial magnitude of DoRA, (out_features), from the adapter's initial values.

        The magnitude is the norm of each row of the adapted weight, computed by the operator that forward
        uses, so that magnitude / norm is exactly 1 at first. The operator does not store a dense copy of a
        quantised weight.
        """
        weight = self.base_weight()
        where, exact = weight.device, wide(weight.dtype)
        weight, lora_A, lora_B = self.matrices(weight, lora_A.to(where, exact), lora_B.to(where, exact))
        if options.starts_at_zero:
            lora_A, lora_B = lora_A[:0], lora_B[:, :0]
        return lora_weight_norm(weight, lora_A, lora_B, scaling=options.scaling)

    def norm(self, name: str) -> Tensor:
        """Return the norms of the rows of the base weight plus an adapter's product, (out_features).

        In evaluation without gradients the norms are cached until the weight, a low-rank parameter or the
        scaling changes. Writes through ``.data`` are not seen there; ``eval()`` drops the norms.
        """
        tensors = self.factors(name)
        scaling = self.adapters[name].scaling
        # The weight norms of DoRA are not cached in a compiled graph, nor for inference tensors, which have
        # no version counter. Distributed runs do not cache them either: FSDP refills tensors without
        # increasing version counters.
        keep = not (
            torch.compiler.is_compiling()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())
            or any(t.is_inference() for t in tensors)
        )
        if keep:
            state = (
                scaling,
                [(t._version, t.device, t.dtype, t.data_ptr() if i else None) for i, t in enumerate(tensors)],
            )
            former = self.__dict__.setdefault("_norms", {}).get(name)
            # The cached norms are not used where weights may be trained, nor afterwards. An optimizer may write
            # weights through .data or a pointer, as PyTorch's fused ones do, which does not increase the version
            # counter. Models are also trained in evaluation mode. The norms are used during backward, because a
            # checkpoint then recomputes a forward with unchanged weights.
            trains = self.training or torch.is_grad_enabled()
            in_backward = torch._C._current_graph_task_id() != -1
            if (
                former
                and (in_backward or not (trains or former[3]))
                and former[1] == state
                and all(a is b for a, b in zip(former[0], tensors, strict=True))
            ):
                result: Tensor = former[2]
                return result
        with torch.no_grad():
            norm = lora_weight_norm(*self.matrices(*tensors), scaling=scaling)
        if keep:
            self.__dict__["_norms"][name] = (tensors, state, norm, trains)
        return norm

    def train(self, mode: bool = True) -> "LowRankLayer":
        self.__dict__.pop("_norms", None)
        return super().train(mode)

    def remove(self, name: str) -> None:
        self.__dict__.get("_norms", {}).pop(name, None)
        super().remove(name)

    def detach(self) -> dict[str, Any]:
        self.__dict__.pop("_norms", None)
        return super().detach()

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        self.__dict__.pop("_norms", None)  # writes through .data may have made the cache stale
        dense = self.dense_weight()
        weight = low_rank_sum(dense, self.parts([n for n in names if not self.adapters[n].dora]))
        base_bias = getattr(self, "bias", None)
        bias = None if base_bias is None else base_bias.detach().to(dense.dtype)
        for name in names:
            if self.adapters[name].dora:
                gained = low_rank_sum(dense, [self.part(name)]) * self.gain(name).detach()[:, None].to(
                    dense.dtype
                )
                weight += gained - dense
            if self.adapters[name].lora_bias:
                bias = add(bias, self.adapters[name].scaling * self.lora_bias[name].detach().to(dense.dtype))
        result = {"weight": self.folded(weight)}
        return result if bias is None else result | {"bias": bias}


def draw(
    shape_A: Sequence[int], shape_B: Sequence[int], options: LoraOptions, through: torch.dtype | None
) -> dict[str, Tensor]:
    """Return initial values of an adapter, on the CPU. Most values of ``init`` set lora_B and lora_bias to zero.

    PEFT first constructs one nn.Module each for lora_A and lora_B, whose constructor draws random numbers.
    This function draws as many random numbers, so the same seed gives the same values as in PEFT.
    ``through`` is the dtype of a dense base weight, to which PEFT rounds the values; None: no rounding.
    """
    lora_A, lora_B = torch.empty(shape_A, device="cpu"), torch.empty(shape_B, device="cpu")
    nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
    nn.init.kaiming_uniform_(lora_B, a=math.sqrt(5))
    bias = torch.empty(shape_B[0] if options.lora_bias else 0, device="cpu")
    bound = 1 / math.sqrt(lora_B[0].numel())
    bias.uniform_(-bound, bound)
    if options.init == "orthogonal":
        lora_A, lora_B = _orthogonal(shape_A, shape_B)
    elif options.init != "random":
        if options.init == "gaussian":
            nn.init.normal_(lora_A, std=1 / options.rank)
        else:
            nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
        lora_B.zero_()
        bias.zero_()
    tensors = {"lora_A": lora_A, "lora_B": lora_B} | ({"lora_bias": bias} if options.lora_bias else {})
    return {key: value.to(through or value.dtype) for key, value in tensors.items()}


def _orthogonal(shape_A: Sequence[int], shape_B: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return random lora_A and lora_B with ``lora_B @ lora_A == 0`` up to rounding.

    The columns of lora_A are combinations of the even rows of a random orthogonal matrix, the rows of lora_B
    combinations of its odd rows.
    """
    rank = shape_A[0]
    rows, _ = torch.linalg.qr(torch.randn(rank, rank, device="cpu"))
    lora_A = torch.randn(shape_A[1], rank // 2, device="cpu") @ rows[0::2]
    lora_B = torch.randn(rank // 2, shape_B[0], device="cpu").T @ rows[1::2]
    return (lora_A.T / 10).contiguous(), (lora_B / 10).contiguous()


def concatenated(parts: Sequence[Part]) -> tuple[Tensor | None, Tensor | None, float]:
    """Concatenate several low-rank products along the rank; return one lora_A, lora_B and scaling.

    If there are several products, each lora_B is multiplied by its scaling, and the returned scaling is 1.
    """
    if not parts:
        return None, None, 1.0
    if len(parts) == 1:
        return parts[0].lora_A, parts[0].lora_B, parts[0].scaling
    lora_B = torch.cat([part.lora_B * part.scaling for part in parts], 1)
    return torch.cat([part.lora_A for part in parts]), lora_B, 1.0


def row_scale(parts: Sequence[Part], x: Tensor) -> Tensor | None:
    """Return a mask (tokens, sum of ranks): 1 if the token's row of the batch uses the column's adapter.

    Each adapter has as many columns as its rank. Return None if there are no adapters.
    """
    columns = [
        x.new_ones(x.shape[0], part.lora_A.shape[0], dtype=part.lora_A.dtype)
        * (1 if part.uses is None else part.uses)
        for part in parts
    ]
    if not columns:
        return None
    scale = torch.cat(columns, 1)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (scale.shape[1],)
    return scale.view(shape).expand(*x.shape[:-1], scale.shape[1]).reshape(-1, scale.shape[1])


def low_rank_sum(dense: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return ``dense`` plus all low-rank products as a new tensor, in the dtype of ``dense``."""
    total = dense.clone()
    for part in parts:
        total.addmm_(
            part.lora_B.detach().to(dense.dtype), part.lora_A.detach().to(dense.dtype), alpha=part.scaling
        )
    return total


def add(first: Tensor | None, *others: Tensor) -> Tensor | None:
    """Return the sum of the tensors. ``first`` may be None, which counts as zero."""
    for other in others:
        first = other if first is None else first + other
    return first

"""Linear layers that have taken on low-rank adapters."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.lora.adapted import AdaptedLayer, wide
from shoestring.lora.options import LoraOptions
from shoestring.nn.quantized_linear import load_quantized, save_quantized
from shoestring.ops.lora_linear import lora_linear, lora_weight_norm
from shoestring.ops.seeded_dropout import seeded_dropout
from shoestring.quantized_tensor import QuantizedTensor


class Part(NamedTuple):
    """One adapter's low-rank product."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    uses: Tensor | None  # (rows, 1): which rows of the batch have it; None is all


class AdaptedLinear(AdaptedLayer, nn.Linear):
    """``nn.Linear`` or ``QuantizedLinear`` with adapters over a frozen weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Converts the input as ``QuantizedLinear`` does, and the result back."""
        return self.product(x.to(getattr(self, "compute_dtype", None) or x.dtype)).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def dense_weight(self) -> Tensor:
        """The base weight in fp32, of an fp64 one in fp64."""
        exact = wide(self.weight.dtype)
        w = self.weight
        return w.dequantize(exact) if isinstance(w, QuantizedTensor) else w.detach().to(exact)

    def extra_repr(self) -> str:
        kind = f", {self.weight.quant_type}" if isinstance(self.weight, QuantizedTensor) else ""
        return f"{super().extra_repr()}{kind}, adapters: {', '.join(self.adapters)}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_quantized(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        load_quantized(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LoraLinear(AdaptedLinear):
    """A linear layer with LoRA or DoRA adapters.

    ``lora_A.<name>`` is (rank, in_features), ``lora_B.<name>`` (out_features, rank), with lora_bias ``lora_bias.<name>``
    and with DoRA ``lora_magnitude_vector.<name>`` (out_features). An adapter that changed the base keeps its first values
    in ``initial_A`` and ``initial_B``, so that the base as it was is at hand whenever the adapter is not in use.

    Several active adapters are one product: concatenated along the rank, their scaling in lora_B. Several of DoRA add
    what each of them alone adds to the base.
    """

    PARAMETERS = {
        "lora_A": "lora_A.weight",
        "lora_B": "lora_B.weight",
        "lora_bias": "lora_B.bias",
        "lora_magnitude_vector": "lora_magnitude_vector",
    }
    MODULES = ("initial_A", "initial_B")
    CAN_MIX_ROWS = True

    def shapes(self, options: LoraOptions) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (options.rank, self.in_features),
            "lora_B": (self.out_features, options.rank),
        }
        for attribute, there in (("lora_bias", options.lora_bias), ("lora_magnitude_vector", options.dora)):
            if there:
                shapes[attribute] = (self.out_features,)
        return shapes

    def start(self, options: LoraOptions) -> dict[str, Tensor]:
        shapes = self.shapes(options)
        through = None if isinstance(self.weight, QuantizedTensor) else self.weight.dtype
        tensors = draw(shapes["lora_A"], shapes["lora_B"], options, through)
        if options.dora:
            tensors["lora_magnitude_vector"] = self.dense_weight().norm(dim=1)
        return tensors

    def keep_initial(self, name: str) -> None:
        """Remembers the values that an adapter has now as what was taken out of the base."""
        for attribute, held in (("initial_A", self.lora_A), ("initial_B", self.lora_B)):
            if not hasattr(self, attribute):
                setattr(self, attribute, nn.ParameterDict())
            getattr(self, attribute)[name] = nn.Parameter(held[name].detach().clone(), requires_grad=False)

    def part(self, name: str) -> Part:
        """An adapter's two matrices."""
        return Part(self.lora_A[name], self.lora_B[name], self.adapters[name].scaling, None)

    def parts(self, names: Sequence[str], x: Tensor | None = None) -> list[Part]:
        """What is added to the base weight: the named adapters, and what the others took out of it."""
        found = [self.part(name)._replace(uses=self._uses(name, x)) for name in names]
        for name, first in getattr(self, "initial_A", {}).items():
            took = Part(first, self.initial_B[name], self.adapters[name].scaling, None)
            if name not in names:
                found.append(took)
            elif self.rows is not None and self.enabled:
                assert x is not None
                found.append(took._replace(uses=1 - self.uses(name, x)))
        return found

    def product(self, x: Tensor) -> Tensor:
        names = self.current()
        parts = self.parts(names, x)
        lora_A, lora_B, scaling = concatenated(parts)
        options = {"scaling": scaling, "dropout": self._dropout(names)}
        gains = {name: self.gain(name) for name in names if self.adapters[name].dora}
        biases = {n: self.adapters[n].scaling * self.lora_bias[n] for n in names if self.adapters[n].lora_bias}
        if self.rows is not None and self.enabled:
            y = lora_linear(x, self.weight, lora_A, lora_B, low_scale=row_scale(parts, x), **options)
            return self._row_by_row(y, x, gains, biases)
        bias = add(self.bias, *biases.values())
        if len(gains) == len(names) == 1:
            return lora_linear(x, self.weight, lora_A, lora_B, bias, gain=gains[names[0]], **options)
        if not gains:
            return lora_linear(x, self.weight, lora_A, lora_B, bias, **options)
        # Each adapter's own gain on its own product; on the base's, all of what they change.
        change = 1 + torch.stack([gain - 1 for gain in gains.values()]).sum(0)
        y = lora_linear(x, self.weight, None, None, bias, gain=change)
        scaled = [part._replace(lora_B=part.lora_B * gains[n][:, None]) if n in gains else part
                  for n, part in zip(names, parts, strict=True)]  # fmt: skip
        lora_A, lora_B, scaling = concatenated(scaled)
        dropped = seeded_dropout(x, options["dropout"]).to(lora_A.dtype)
        return y + (scaling * F.linear(F.linear(dropped, lora_A), lora_B)).to(y.dtype)

    def _row_by_row(self, y: Tensor, x: Tensor, gains: dict[str, Tensor], biases: dict[str, Tensor]) -> Tensor:
        shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
        if gains:
            change = torch.stack([self.uses(name, x) * (gain - 1) for name, gain in gains.items()]).sum(0)
            y = y * (1 + change).view(shape).to(y.dtype)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        for name, bias in biases.items():
            y = y + (self.uses(name, x) * bias).view(shape).to(y.dtype)
        return y

    def _uses(self, name: str, x: Tensor | None) -> Tensor | None:
        return None if self.rows is None or not self.enabled or x is None else self.uses(name, x)

    def _dropout(self, names: Sequence[str]) -> float:
        chosen = {self.adapters[name].dropout for name in names} if self.training else set()
        if len(chosen) > 1:
            raise ValueError(
                f"lora.LoraLinear: dropout: expected the same of all active adapters in training, received {sorted(chosen)}"
            )
        return chosen.pop() if chosen else 0.0

    def gain(self, name: str) -> Tensor:
        """DoRA's magnitude over the norm of the adapted weight's rows, the norm being no part of the gradient."""
        return self.lora_magnitude_vector[name] / self.norm(name).to(self.lora_magnitude_vector[name].dtype)

    def norm(self, name: str) -> Tensor:
        """The norms of the rows of weight + scaling lora_B lora_A, (out_features); kept until one of them changes."""
        tensors = (self.weight, self.lora_A[name], self.lora_B[name])
        scaling = self.adapters[name].scaling
        # A compiled graph computes it: what it was traced with may change. So do processes that share the weights (FSDP),
        # whose tensors are filled anew behind their version.
        keep = not (
            torch.compiler.is_compiling()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())
            or any(t.is_inference() for t in tensors)
        )
        if keep:
            state = (scaling, [(t._version, t.device, t.dtype, t.data_ptr() if i else None) for i, t in enumerate(tensors)])
            former = self.__dict__.setdefault("_norms", {}).get(name)
            if former and former[1] == state and all(a is b for a, b in zip(former[0], tensors, strict=True)):
                return former[2]
        with torch.no_grad():
            norm = lora_weight_norm(*tensors, scaling=scaling)
        if keep:
            self.__dict__["_norms"][name] = (tensors, state, norm)
        return norm

    def remove(self, name: str) -> None:
        initial = getattr(self, "initial_A", {})
        if name in initial:
            took = Part(initial[name], self.initial_B[name], self.adapters[name].scaling, None)
            self.set_weight(low_rank_sum(self.dense_weight(), [took]))
            del initial[name], self.initial_B[name]
            if not len(initial):
                del self.initial_A, self.initial_B
        self.__dict__.get("_norms", {}).pop(name, None)
        super().remove(name)

    def detach(self) -> dict[str, Any]:
        self.__dict__.pop("_norms", None)
        return super().detach()

    def set_weight(self, dense: Tensor) -> None:
        """Replaces the base's values, in the base's own form."""
        self.weight.detach().copy_(dense)

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        dense = self.dense_weight()
        weight = low_rank_sum(dense, self.parts([n for n in names if not self.adapters[n].dora]))
        bias = None if self.bias is None else self.bias.detach().to(dense.dtype)
        for name in names:
            if self.adapters[name].dora:
                gained = low_rank_sum(dense, [self.part(name)]) * self.gain(name).detach()[:, None].to(dense.dtype)
                weight += gained - dense
            if self.adapters[name].lora_bias:
                bias = add(bias, self.adapters[name].scaling * self.lora_bias[name].detach().to(dense.dtype))
        result = {"weight": weight}
        return result if bias is None else result | {"bias": bias}


def draw(
    shape_A: Sequence[int], shape_B: Sequence[int], options: LoraOptions, through: torch.dtype | None
) -> dict[str, Tensor]:
    """First values on the CPU, rounded to a dense base's dtype as PEFT's are.

    PEFT builds two layers, which draw for themselves, before it initialises: ours draw along.
    """
    lora_A = torch.empty(shape_A)
    nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
    nn.init.kaiming_uniform_(torch.empty(shape_B), a=math.sqrt(5))
    if options.lora_bias:
        torch.empty(shape_B[0]).uniform_()
    if options.init == "gaussian":
        nn.init.normal_(lora_A, std=1 / options.rank)
    else:
        nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5))
    tensors = {"lora_A": lora_A.to(through or lora_A.dtype), "lora_B": torch.zeros(shape_B)}
    return tensors | ({"lora_bias": torch.zeros(shape_B[0])} if options.lora_bias else {})


def concatenated(parts: Sequence[Part]) -> tuple[Tensor | None, Tensor | None, float]:
    """All parts as one: lora_A, lora_B and scaling, which is in lora_B where there are several."""
    if not parts:
        return None, None, 1.0
    if len(parts) == 1:
        return parts[0].lora_A, parts[0].lora_B, parts[0].scaling
    lora_B = torch.cat([part.lora_B * part.scaling for part in parts], 1)
    return torch.cat([part.lora_A for part in parts]), lora_B, 1.0


def row_scale(parts: Sequence[Part], x: Tensor) -> Tensor | None:
    """(tokens, rank): 1 where a token's row uses the adapter that the rank belongs to."""
    columns = [
        x.new_ones(x.shape[0], part.lora_A.shape[0], dtype=part.lora_A.dtype) * (1 if part.uses is None else part.uses)
        for part in parts
    ]
    if not columns:
        return None
    scale = torch.cat(columns, 1)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (scale.shape[1],)
    return scale.view(shape).expand(*x.shape[:-1], scale.shape[1]).reshape(-1, scale.shape[1])


def low_rank_sum(dense: Tensor, parts: Sequence[Part]) -> Tensor:
    """dense + scaling lora_B lora_A of every part, in dense's dtype; a new tensor."""
    total = dense.clone()
    for part in parts:
        total.addmm_(part.lora_B.detach().to(dense.dtype), part.lora_A.detach().to(dense.dtype), alpha=part.scaling)
    return total


def add(first: Tensor | None, *others: Tensor) -> Tensor | None:
    """The sum of what is there."""
    for other in others:
        first = other if first is None else first + other
    return first

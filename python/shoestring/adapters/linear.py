"""Define LoraLinear, the class of linear layers with LoRA or DoRA adapters."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.adapters.adapted import AdaptedLayer, wide
from shoestring.adapters.lora_linear import LoraWeight, lora_linear
from shoestring.adapters.low_rank import LowRankLayer, Part, add, concatenated, draw, low_rank_sum, row_scale
from shoestring.adapters.options import LoraOptions
from shoestring.layers.seeded_dropout import seeded_dropout
from shoestring.quantization.quantized_linear_module import KeyedLinear
from shoestring.quantization.quantized_tensor import QuantizedTensor


class AdaptedLinear(AdaptedLayer, KeyedLinear):
    """``nn.Linear`` or ``QuantizedLinear`` with adapters over a frozen weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer in its compute_dtype, if it has one, and return the output in the dtype of x."""
        return self.product(x.to(getattr(self, "compute_dtype", None) or x.dtype)).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``, which is in the compute dtype."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """Return the base weight, dense or quantised, as (out_features, in_features)."""
        return self.weight

    def folded(self, matrix: Tensor) -> Tensor:
        """Return a matrix (out_features, in_features) reshaped to the shape of the layer's weight."""
        return matrix

    def dense_weight(self) -> Tensor:
        """Return the base weight as a dense tensor, in fp64 if the weight is fp64, else in fp32."""
        exact = wide(self.weight.dtype)
        w = self.weight
        return w.dequantize(exact) if isinstance(w, QuantizedTensor) else w.detach().to(exact)

    def extra_repr(self) -> str:
        kind = f", {self.weight.quant_type}" if isinstance(self.weight, QuantizedTensor) else ""
        return f"{super().extra_repr()}{kind}, adapters: {', '.join(self.adapters)}"


class LowRankLinear(LowRankLayer):
    """The parameters of LoRA or DoRA adapters of a linear layer, and their initial values."""

    PARAMETERS = {
        "lora_A": "lora_A.weight",
        "lora_B": "lora_B.weight",
        "lora_bias": "lora_B.bias",
        "lora_magnitude_vector": "lora_magnitude_vector",
    }
    lora_A: nn.ParameterDict
    lora_B: nn.ParameterDict

    @classmethod
    def shapes(cls, layer: Any, options: LoraOptions) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (options.rank, layer.in_features),
            "lora_B": (layer.out_features, options.rank),
        }
        for attribute, used in (("lora_bias", options.lora_bias), ("lora_magnitude_vector", options.dora)):
            if used:
                shapes[attribute] = (layer.out_features,)
        return shapes

    def start(self, options: LoraOptions) -> dict[str, Tensor]:
        shapes = self.shapes(self, options)
        through = None if isinstance(self.weight, QuantizedTensor) else self.weight.dtype
        tensors = draw(shapes["lora_A"], shapes["lora_B"], options, through)
        if options.dora:
            values = tensors["lora_A"], tensors["lora_B"]
            tensors["lora_magnitude_vector"] = self.first_magnitude(options, *values)
        return tensors

    def factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.lora_A[name], self.lora_B[name]


class LoraLinear(AdaptedLinear, LowRankLinear):
    """A linear layer with LoRA or DoRA adapters.

    ``lora_A.<name>`` is (rank, in_features) and ``lora_B.<name>`` (out_features, rank). ``lora_bias.<name>``,
    with lora_bias, and ``lora_magnitude_vector.<name>``, with DoRA, are (out_features).

    An adapter whose initialisation changed the base weight (PiSSA, OLoRA, LoftQ) keeps copies of its initial
    values in ``initial_A`` and ``initial_B``. While the adapter is not active, the product of the initial
    values is added to the changed base weight, which gives the original base weight.

    Several active adapters are computed as one product: their matrices are concatenated along the rank, and
    their scalings multiply lora_B. With several active DoRA adapters, the layer adds up the changes of its
    output that each of them alone would make.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> model = shoestring.lora.apply(model, rank=2)
        >>> type(model[0]).__name__, model[0].lora_A["default"].shape
        ('LoraLinear', torch.Size([2, 8]))
    """

    MODULES: ClassVar[tuple[str, ...]] = ("initial_A", "initial_B")
    initial_A: nn.ParameterDict
    initial_B: nn.ParameterDict

    def keep_initial(self, name: str) -> None:
        """Copy lora_A and lora_B, whose product was subtracted from the weight, to initial_A, initial_B."""
        for attribute, values in (("initial_A", self.lora_A), ("initial_B", self.lora_B)):
            if not hasattr(self, attribute):
                setattr(self, attribute, nn.ParameterDict())
            getattr(self, attribute)[name] = nn.Parameter(values[name].detach().clone(), requires_grad=False)

    def parts(self, names: Sequence[str], x: Tensor | None = None) -> list[Part]:
        """Return the low-rank products to add to the base weight.

        The list contains the products of the adapters ``names``. It also contains the initial product of each
        adapter outside ``names`` whose initial product was subtracted from the base weight. If each row of
        the batch has its own adapter, the initial product is added for the rows that do not use the adapter.
        """
        parts = [self.part(name)._replace(uses=self._uses(name, x)) for name in names]
        for name, first in getattr(self, "initial_A", {}).items():
            initial = Part(first, self.initial_B[name], self.adapters[name].scaling, None)
            if name not in names:
                parts.append(initial)
            elif self.rows is not None and self.enabled:
                assert x is not None
                parts.append(initial._replace(uses=1 - self.uses(name, x)))
        return parts

    def lora_weight(self) -> tuple[LoraWeight, float] | None:
        """Return the layer's weight and active adapters as one LoraWeight, and the dropout probability.

        Return None if rows of the batch use different adapters, or if several adapters are active and one
        uses DoRA.
        """
        names = self.current()
        gained = [name for name in names if self.adapters[name].dora]
        if (self.rows is not None and self.enabled) or (gained and len(names) > 1):
            return None
        lora_A, lora_B, scaling = concatenated(self.parts(names))
        gain = self.gain(gained[0]) if gained else None
        bias = add(
            self.bias,
            *(self.adapters[n].scaling * self.lora_bias[n] for n in names if self.adapters[n].lora_bias),
        )
        return LoraWeight(self.matrix(), lora_A, lora_B, bias, scaling, gain), self.dropout_of(names)

    def product(self, x: Tensor) -> Tensor:
        """Return the layer's output with its active adapters, by one call of ``lora_linear`` if possible."""
        one = self.lora_weight()
        if one is not None:
            w, dropout = one
            return lora_linear(
                x, w.weight, w.lora_A, w.lora_B, w.bias, scaling=w.scaling, gain=w.gain, dropout=dropout
            )
        names = self.current()
        parts = self.parts(names, x)
        lora_A, lora_B, scaling = concatenated(parts)
        dropout = self.dropout_of(names)
        gains = {name: self.gain(name) for name in names if self.adapters[name].dora}
        biases = {
            n: self.adapters[n].scaling * self.lora_bias[n] for n in names if self.adapters[n].lora_bias
        }
        if self.rows is not None and self.enabled:
            low_scale = row_scale(parts, x)
            y = lora_linear(
                x, self.matrix(), lora_A, lora_B, scaling=scaling, low_scale=low_scale, dropout=dropout
            )
            return self._row_by_row(y, x, gains, biases)
        bias = add(self.bias, *biases.values())
        # An adapter's gain is DoRA's magnitude / norm. The gain multiplies the adapter's part of the output.
        # The base weight's part is multiplied by 1 + the sum of (gain - 1) over the adapters.
        change = 1 + torch.stack([gain - 1 for gain in gains.values()]).sum(0)
        y = lora_linear(x, self.matrix(), None, None, bias, gain=change)
        scaled = [part._replace(lora_B=part.lora_B * gains[n][:, None]) if n in gains else part
                  for n, part in zip(names, parts, strict=True)]  # fmt: skip
        lora_A, lora_B, scaling = concatenated(scaled)
        assert lora_A is not None and lora_B is not None
        dropped = seeded_dropout(x, dropout).to(lora_A.dtype)
        return y + (scaling * F.linear(F.linear(dropped, lora_A), lora_B)).to(y.dtype)

    def _row_by_row(
        self, y: Tensor, x: Tensor, gains: dict[str, Tensor], biases: dict[str, Tensor]
    ) -> Tensor:
        """Apply each adapter's gain and bias to the rows of ``y`` that use the adapter."""
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
        """Return ``uses(name, x)`` if ``adapters_per_row`` has chosen adapters for the rows of x, else None."""
        return None if self.rows is None or not self.enabled or x is None else self.uses(name, x)

    def remove(self, name: str) -> None:
        initial = getattr(self, "initial_A", {})
        if name in initial:
            initial_part = Part(initial[name], self.initial_B[name], self.adapters[name].scaling, None)
            self.set_weight(low_rank_sum(self.dense_weight(), [initial_part]))
            del initial[name], self.initial_B[name]
            if not len(initial):
                del self.initial_A, self.initial_B
        super().remove(name)

    def set_weight(self, dense: Tensor) -> None:
        """Copy ``dense`` into the base weight, converted to the weight's dtype or quantised format."""
        self.weight.detach().copy_(dense)

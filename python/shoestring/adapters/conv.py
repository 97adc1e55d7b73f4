"""Convolutions with LoRA and DoRA adapters."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from shoestring.adapters.adapted import wide
from shoestring.adapters.low_rank import LowRankLayer, draw
from shoestring.adapters.options import LoraOptions
from shoestring.layers.seeded_dropout import seeded_dropout


class LoraConv(LowRankLayer, _ConvNd):
    """A convolution with LoRA or DoRA adapters.

    ``lora_A.<name>`` is the weight of the same convolution with ``rank`` outputs, (rank, in_channels,
    *kernel). ``lora_B.<name>`` is the weight of a pointwise convolution, (out_channels, rank, 1, ...). DoRA's
    ``lora_magnitude_vector.<name>`` is (1, out_channels, 1, ...).
    """

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
        ones = (1,) * len(layer.kernel_size)
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (options.rank, layer.in_channels, *layer.kernel_size),
            "lora_B": (layer.out_channels, options.rank, *ones),
        }
        shapes |= {"lora_bias": (layer.out_channels,)} if options.lora_bias else {}
        return shapes | ({"lora_magnitude_vector": (1, layer.out_channels, *ones)} if options.dora else {})

    def start(self, options: LoraOptions) -> dict[str, Tensor]:
        shapes = self.shapes(self, options)
        tensors = draw(shapes["lora_A"], shapes["lora_B"], options, self.weight.dtype)
        if options.dora:
            magnitude = self.first_magnitude(options, tensors["lora_A"], tensors["lora_B"])
            tensors["lora_magnitude_vector"] = magnitude.view(shapes["lora_magnitude_vector"])
        return tensors

    def factors(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.lora_A[name], self.lora_B[name]

    def matrices(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.flatten(1), lora_A.flatten(1), lora_B.flatten(1)

    def gain(self, name: str) -> Tensor:
        magnitude: Tensor = self.lora_magnitude_vector[name].flatten()
        return magnitude / self.norm(name).to(magnitude.dtype)

    def dense_weight(self) -> Tensor:
        return self.weight.detach().flatten(1).to(wide(self.weight.dtype))

    def folded(self, matrix: Tensor) -> Tensor:
        return matrix.view(self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        names, vector = self.current(), (-1,) + (1,) * len(self.kernel_size)
        dropout = self.dropout_of(names)
        pointwise = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]

        def product(name: str) -> Tensor:
            lora_A, lora_B = self.lora_A[name], self.lora_B[name]
            dropped = seeded_dropout(x, dropout) if dropout > 0 else x
            return pointwise(self._conv_forward(dropped.to(lora_A.dtype), lora_A, None), lora_B)

        y = self.composed(self._conv_forward(x, self.weight, None), names, product, vector)
        return y if self.bias is None else y + self.bias.view(vector)

    def extra_repr(self) -> str:
        base: str = super().extra_repr()  # type: ignore[no-untyped-call]  # nn.Conv1d has no annotation here
        return f"{base}, adapters: {', '.join(self.adapters)}"


class LoraConv1d(LoraConv, nn.Conv1d):
    """``nn.Conv1d`` with adapters."""


class LoraConv2d(LoraConv, nn.Conv2d):
    """``nn.Conv2d`` with adapters."""


class LoraConv3d(LoraConv, nn.Conv3d):
    """``nn.Conv3d`` with adapters."""


def conv_refusal(layer: Any) -> str | None:
    """Return None if this convolution can have an adapter, else what is supported, for an error message."""
    return "a convolution with groups=1" if layer.groups != 1 else None

"""Adapters on transformers' ``Conv1D`` (GPT-2), a linear layer whose weight is stored transposed."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from shoestring.adapters.adapted import wide
from shoestring.adapters.ia3 import IA3Linear
from shoestring.adapters.linear import AdaptedLinear, LoraLinear
from shoestring.adapters.targets import is_conv1d
from shoestring.adapters.vera import VeraLinear


class TransposedLinear(AdaptedLinear):
    """A layer whose weight is (in_features, out_features). The operators read a transposed view of it."""

    @classmethod
    def shapes(cls, layer: Any, options: Any) -> dict[str, tuple[int, ...]]:
        columns, rows = layer.weight.shape
        return super().shapes(SimpleNamespace(in_features=columns, out_features=rows), options)

    @property
    def in_features(self) -> int:  # type: ignore[override]  # an attribute of nn.Linear
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]

    def matrix(self) -> Tensor:
        return self.weight.T

    def matrices(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.T, lora_A, lora_B

    def dense_weight(self) -> Tensor:
        return self.weight.detach().T.to(wide(self.weight.dtype))

    def folded(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous()

    def set_weight(self, dense: Tensor) -> None:
        self.weight.detach().copy_(dense.T)


class LoraTransposedLinear(TransposedLinear, LoraLinear):
    """``Conv1D`` with LoRA or DoRA adapters."""


class VeraTransposedLinear(TransposedLinear, VeraLinear):
    """``Conv1D`` with VeRA adapters."""


class IA3TransposedLinear(TransposedLinear, IA3Linear):
    """``Conv1D`` with IA3 adapters."""


def former_matrix(layer: nn.Module) -> Tensor:
    """Return the weight of a linear layer or Conv1D as (out_features, in_features), without a copy."""
    weight: Any = layer.weight
    return weight.T if is_conv1d(layer) else weight  # type: ignore[no-any-return]

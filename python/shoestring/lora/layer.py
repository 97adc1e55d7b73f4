"""A linear layer that has taken on an adapter."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.nn.quantized_linear import QuantizedLinear, frozen, load_quantized, save_quantized
from shoestring.ops.lora_linear import lora_linear
from shoestring.quantized_tensor import QuantizedTensor

# Parameters are keyed by the adapter's name, as in PEFT: `lora_A.default`.
ADAPTER = "default"


@dataclass
class Unmerged:
    """What a merged layer keeps, to become again exactly what it was."""

    weight: nn.Parameter
    lora_A: nn.ParameterDict
    lora_B: nn.ParameterDict


class LoraLinear(nn.Linear):
    """``nn.Linear`` or ``QuantizedLinear`` with a frozen weight and a trainable low-rank adapter.

    Not constructed: :func:`attach` gives an existing layer this class, so hooks, shared references and the base's own
    keys in ``state_dict`` stay. ``lora_A.default`` is (rank, in_features), ``lora_B.default`` (out_features, rank).
    """

    lora_A: nn.ParameterDict
    lora_B: nn.ParameterDict
    rank: int
    alpha: float
    rslora: bool
    dropout: float

    @property
    def scaling(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(getattr(self, "compute_dtype", None) or dtype)
        y = lora_linear(
            x,
            self.weight,
            self.lora_A[ADAPTER],
            self.lora_B[ADAPTER],
            self.bias,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
        )
        return y.to(dtype)

    def merged_weight(self) -> Tensor:
        """weight + scaling * lora_B lora_A in the weight's dtype, rounded once."""
        w = self.weight
        exact = torch.float64 if w.dtype == torch.float64 else torch.float32
        dense = w.dequantize(exact) if isinstance(w, QuantizedTensor) else w.detach().to(exact)
        up, down = self.lora_B[ADAPTER].detach().to(exact), self.lora_A[ADAPTER].detach().to(exact)
        return torch.addmm(dense, up, down, alpha=self.scaling).to(w.dtype)

    def extra_repr(self) -> str:
        kind = f", {self.weight.quant_type}" if isinstance(self.weight, QuantizedTensor) else ""
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}{kind}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_quantized(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        load_quantized(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def attach(
    linear: nn.Linear, lora_A: Tensor, lora_B: Tensor, *, alpha: float, rslora: bool, dropout: float
) -> LoraLinear:
    """Gives ``linear``, which stays the same object, an adapter; freezes its own parameters."""
    linear.requires_grad_(False)
    linear.__dict__.pop("unmerged", None)  # of an earlier merge: there is no way back past a new adapter
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    linear.lora_A = nn.ParameterDict({ADAPTER: nn.Parameter(lora_A)})
    linear.lora_B = nn.ParameterDict({ADAPTER: nn.Parameter(lora_B)})
    linear.rank, linear.alpha, linear.rslora, linear.dropout = lora_A.shape[0], alpha, rslora, dropout
    return linear


def merge_layer(layer: LoraLinear, reversible: bool) -> None:
    """Turns the layer into a plain ``nn.Linear`` with the adapter added to its weight."""
    weight = layer.merged_weight()
    kept = Unmerged(layer.weight, layer.lora_A, layer.lora_B)
    del layer.lora_A, layer.lora_B
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.__class__ = nn.Linear
    if reversible:
        layer.unmerged = kept  # type: ignore[assignment]


def unmerge_layer(layer: nn.Linear) -> None:
    """The reverse: the former weight, bit for bit, and its adapter."""
    kept = layer.__dict__.pop("unmerged")
    device = layer.weight.device
    layer.__class__ = LoraLinear
    layer.weight = frozen(kept.weight.detach().to(device))
    layer.lora_A, layer.lora_B = kept.lora_A.to(device), kept.lora_B.to(device)


def is_plain(module: nn.Module) -> bool:
    """True for the layers that can take on an adapter: nn.Linear and QuantizedLinear, but not what derives from them."""
    return type(module) in (nn.Linear, QuantizedLinear)

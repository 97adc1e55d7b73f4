"""VeRA: linear layers that share two frozen random matrices and train two vectors each."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.adapted import wide
from shoestring.adapters.linear import LoraLinear
from shoestring.adapters.low_rank import Part
from shoestring.adapters.options import VeraOptions


class Projection(nn.Module):
    """The two random matrices of a VeRA adapter, which all of its layers share.

    vera_A is (rank, largest in_features) and vera_B (largest out_features, rank). A layer with fewer features
    uses the first columns of vera_A and the first rows of vera_B.
    """

    def __init__(self, vera_A: Tensor, vera_B: Tensor) -> None:
        super().__init__()
        self.register_buffer("vera_A", vera_A)
        self.register_buffer("vera_B", vera_B)


class VeraLinear(LoraLinear):
    """A linear layer with VeRA adapters (arXiv 2310.11454).

    It computes ``x W^T + bias + lambda_b * ((lambda_d * (x A^T)) B^T)``, where W, A and B are frozen. A and B
    are the shared matrices vera_A and vera_B. The parameter ``vera_lambda_d.<name>`` is (rank). The parameter
    ``vera_lambda_b.<name>`` is (out_features) and starts as zeros.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> model = shoestring.lora.apply(model, shoestring.lora.VeraOptions(rank=16))
        >>> type(model[0]).__name__, model[0].vera_lambda_d["default"].shape
        ('VeraLinear', torch.Size([16]))
    """

    PARAMETERS = {"vera_lambda_b": "vera_lambda_b", "vera_lambda_d": "vera_lambda_d"}
    MODULES = (*LoraLinear.MODULES, "vera")
    vera_lambda_b: nn.ParameterDict
    vera_lambda_d: nn.ParameterDict
    vera: nn.ModuleDict  # adapter name -> the Projection (shared random matrices) of the adapter

    @classmethod
    def shapes(cls, layer: nn.Linear, options: VeraOptions) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {"vera_lambda_b": (layer.out_features,), "vera_lambda_d": (options.rank,)}

    def start(self, options: VeraOptions) -> dict[str, Tensor]:  # type: ignore[override]
        return {
            "vera_lambda_b": torch.zeros(self.out_features),
            "vera_lambda_d": torch.full((options.rank,), options.d_initial),
        }

    def part(self, name: str) -> Part:
        shared: Any = self.vera[name]
        lora_A = self.vera_lambda_d[name][:, None] * shared.vera_A[:, : self.in_features]
        lora_B = self.vera_lambda_b[name][:, None] * shared.vera_B[: self.out_features]
        return Part(lora_A, lora_B, 1.0, None)

    def remove(self, name: str) -> None:
        del self.vera[name]
        if not len(self.vera):
            del self.vera
        super().remove(name)


def drawn(layers: Sequence[nn.Linear], options: VeraOptions) -> Projection:
    """Draw the two shared matrices of VeRA from the seed as PEFT does, large enough for all layers."""
    generator = torch.Generator("cpu").manual_seed(options.seed)
    columns, rows = max(m.in_features for m in layers), max(m.out_features for m in layers)
    matrices = []
    for shape in ((options.rank, columns), (rows, options.rank)):
        bound = math.sqrt(6 / shape[1])
        matrices.append(torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator))
    return Projection(*matrices)


def share(
    layers: Sequence[VeraLinear], name: str, options: VeraOptions, projection: Projection | None
) -> None:
    """Give all layers of an adapter the same two random matrices, ``projection``; if None, draw them now."""
    first = layers[0].base_weight()
    projection = (projection or drawn(layers, options)).to(first.device, wide(first.dtype))
    for layer in layers:
        if not hasattr(layer, "vera"):
            layer.vera = nn.ModuleDict()
        layer.vera[name] = projection

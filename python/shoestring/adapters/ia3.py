"""Linear layers whose output or input is multiplied by a trained vector (IA3)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring.adapters.linear import AdaptedLinear
from shoestring.adapters.lora_linear import lora_linear
from shoestring.adapters.options import IA3Options


class IA3Linear(AdaptedLinear):
    """A linear layer with IA3 adapters (arXiv 2205.05638).

    With the trained vector l, it computes ``l * (x W^T + bias)``, or ``(l * x) W^T + bias`` for the modules
    in ``feedforward_modules``. The parameter ``ia3_l.<name>`` holds l: (out_features, 1), or (1, in_features)
    for ``feedforward_modules``. It starts as ones. If several adapters are active, their vectors are
    multiplied elementwise.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> model = shoestring.lora.apply(model, shoestring.lora.IA3Options())
        >>> type(model[0]).__name__, model[0].ia3_l["default"].shape
        ('IA3Linear', torch.Size([4, 1]))
    """

    PARAMETERS = {"ia3_l": "ia3_l"}
    ia3_l: nn.ParameterDict

    @classmethod
    def shapes(cls, layer: nn.Linear, options: IA3Options) -> dict[str, tuple[int, ...]]:
        return {"ia3_l": (1, layer.in_features) if options.feedforward else (layer.out_features, 1)}

    def start(self, options: IA3Options) -> dict[str, Tensor]:
        return {"ia3_l": torch.ones(self.shapes(self, options)["ia3_l"])}

    def _gains(self, names: Sequence[str]) -> tuple[Tensor | None, Tensor | None]:
        """Return the vectors that multiply the layer's input and output; None where there is no vector."""
        gains: list[Tensor | None] = [None, None]
        for name in names:
            vector = self.ia3_l[name].flatten()
            side = 0 if self.adapters[name].feedforward else 1
            former = gains[side]
            gains[side] = vector if former is None else former * vector
        return gains[0], gains[1]

    def product(self, x: Tensor) -> Tensor:
        before, after = self._gains(self.current())
        if before is not None:
            x = (x * before).to(x.dtype)
        bias = self.bias if self.bias is None or after is None else self.bias * after
        return lora_linear(x, self.matrix(), None, None, bias, gain=after)

    def merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        before, after = self._gains(names)
        weight = self.dense_weight()
        bias = None if self.bias is None else self.bias.detach().to(weight.dtype)
        if before is not None:
            weight = weight * before.detach()
        if after is not None:
            weight = weight * after.detach()[:, None]
            bias = bias if bias is None else bias * after.detach()
        result = {"weight": self.folded(weight)}
        return result if bias is None else result | {"bias": bias}

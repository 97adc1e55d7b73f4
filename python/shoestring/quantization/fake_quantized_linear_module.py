"""A linear layer for quantisation-aware training."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.quantization.fake_quantize import fake_quantize
from shoestring.quantization.quantized_linear_module import QuantizedLinear, check_form, quantize_weight


class FakeQuantizedLinear(nn.Linear):
    """``nn.Linear`` that computes with the weight that it will have once it is quantised.

    Forward is ``F.linear(x, fake_quantize(weight), bias)``. The weight stays a dense parameter that an
    optimizer trains, and receives the gradient of its fake-quantised values (straight-through estimator,
    arXiv 1308.3432). Parameters, initialisation and ``state_dict`` are those of ``nn.Linear``.
    ``shoestring.prepare_quantized`` makes such layers of a model's ``nn.Linear`` layers, and
    ``shoestring.convert_quantized`` makes :class:`QuantizedLinear` layers of them.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        quant_type, block_size, double_quant: as for :class:`QuantizedLinear`.

    Raises:
        ValueError: an option is not supported.

    Example:
        >>> layer = shoestring.nn.FakeQuantizedLinear(256, 64, quant_type="int4")
        >>> layer
        FakeQuantizedLinear(in_features=256, out_features=64, bias=True, int4, block_size=64, double_quant=False)
        >>> layer(torch.randn(4, 256)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([64, 256])
    """

    _must_run: ClassVar[bool] = True  # set_fast_paths turns off fused paths that skip forward
    quant_type: str
    block_size: int | None
    double_quant: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        quant_type: str = "nf4",
        block_size: int | None = None,
        double_quant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_form("FakeQuantizedLinear", quant_type, block_size, double_quant)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.quant_type, self.block_size, self.double_quant = quant_type, block_size, double_quant

    def forward(self, x: Tensor) -> Tensor:
        weight = fake_quantize(self.weight, self.quant_type, self.block_size, self.double_quant)
        return F.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        block = self.in_features if self.quant_type == "int8" else self.block_size or 64
        form = f"{self.quant_type}, block_size={block}, double_quant={self.double_quant}"
        return f"{super().extra_repr()}, {form}"


def make_fake_quantized(
    layer: nn.Linear, quant_type: str, block_size: int | None, double_quant: bool
) -> None:
    """Make an ``nn.Linear`` a FakeQuantizedLinear in place. Its parameters stay the same objects."""
    layer.__class__ = FakeQuantizedLinear
    assert isinstance(layer, FakeQuantizedLinear)
    layer.quant_type, layer.block_size, layer.double_quant = quant_type, block_size, double_quant


def make_quantized(layer: FakeQuantizedLinear) -> None:
    """Make a FakeQuantizedLinear a QuantizedLinear in place, with the weight that training has computed with."""
    quantize_weight(layer, layer.quant_type, layer.block_size, layer.double_quant)
    for name in ("quant_type", "block_size", "double_quant"):
        delattr(layer, name)
    layer.__class__ = QuantizedLinear  # type: ignore[assignment]
    layer.compute_dtype = None  # type: ignore[assignment]

"""Normalisation layers over ``shoestring.rms_norm`` and ``shoestring.layer_norm``."""

import torch
from torch import Tensor, nn

from shoestring.layers.layer_norm import layer_norm
from shoestring.layers.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """``shoestring.rms_norm`` with a weight (features), which begins where ``weight + offset`` is 1.

    Its state_dict is that of ``torch.nn.RMSNorm`` and of transformers' norms. As ``torch.nn.RMSNorm`` with
    ``casting="gemma"``, as Llama's with "llama", as Gemma's with ``offset=1, casting="gemma"``.

    Args:
        features: of the last dimension.
        eps, offset, casting: as in ``shoestring.rms_norm``.
        device, dtype: of the weight; it need not be x's dtype.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: str = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.casting = casting
        self.weight = nn.Parameter(torch.full((features,), 1.0 - offset, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., features), normalised, in x's dtype; with a residual, ``x + residual`` normalised, and that sum."""
        return rms_norm(
            x, self.weight, eps=self.eps, residual=residual, offset=self.offset, casting=self.casting
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"


class LayerNorm(nn.Module):
    """``shoestring.layer_norm`` with a weight of ones and a bias of zeros (features) to begin with.

    Its state_dict is that of ``torch.nn.LayerNorm`` over the last dimension.

    Args:
        features: of the last dimension.
        eps: added to the variance.
        bias: whether there is one.
        device, dtype: of the parameters; it need not be x's dtype.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype)) if bias else None

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., features), normalised, in x's dtype."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"

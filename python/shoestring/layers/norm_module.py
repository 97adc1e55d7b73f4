"""RMSNorm and LayerNorm as modules."""

import torch
from torch import Tensor, nn

from shoestring.layers.layer_norm import add_layer_norm, layer_norm
from shoestring.layers.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``shoestring.rms_norm`` with a trainable weight (features), initialised to ``offset + weight = 1``.

    Its state_dict has the keys of ``torch.nn.RMSNorm`` and of the norms in transformers. It rounds like the
    following:

    - ``torch.nn.RMSNorm`` with ``upcast="gemma"``,
    - Llama's norm with ``upcast="llama"``,
    - Gemma's norm with ``offset=1, upcast="gemma"``.

    Args:
        features: size of the last dimension of the input.
        eps, offset, upcast: as in ``shoestring.rms_norm``.
        device, dtype: device and dtype of the weight. The dtype may differ from that of the input.

    Example:
        >>> norm = shoestring.nn.RMSNorm(64)
        >>> x, residual = torch.randn(2, 16, 64)
        >>> normed, total = norm.forward_with_residual(x, residual)
        >>> torch.equal(normed, norm(x + residual))
        True
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        upcast: str = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.upcast = upcast
        self.weight = nn.Parameter(torch.full((features,), 1.0 - offset, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., features). The result has the shape and dtype of x."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, upcast=self.upcast)

    def forward_with_residual(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``forward(x + residual)`` and ``x + residual``, computed in one pass.

        Hooks of the module do not run, since this function does not go through ``__call__``.

        Args:
            x, residual: (..., features), with the same shape and dtype.

        Returns:
            Two tensors with the shape and dtype of x.
        """
        return add_rms_norm(x, residual, self.weight, eps=self.eps, offset=self.offset, upcast=self.upcast)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}, upcast={self.upcast!r}"


class LayerNorm(nn.Module):
    """``shoestring.layer_norm`` with a trainable weight and bias (features), initialised to ones and zeros.

    Its state_dict has the keys of ``torch.nn.LayerNorm`` over the last dimension.

    Args:
        features: size of the last dimension of the input.
        eps: added to the variance.
        bias: whether the layer has a bias.
        device, dtype: device and dtype of the parameters. The dtype may differ from that of the input.

    Example:
        >>> norm = shoestring.nn.LayerNorm(64)
        >>> norm(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
        >>> x, residual = torch.randn(2, 16, 64)
        >>> normed, total = norm.forward_with_residual(x, residual)
        >>> norm.load_state_dict(torch.nn.LayerNorm(64).state_dict())
        <All keys matched successfully>
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
        """Apply layer normalisation to x (..., features) over its last dimension.

        The result has the dtype of x.
        """
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def forward_with_residual(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``forward(x + residual)`` and ``x + residual``, computed in one pass.

        Hooks of the module do not run, since this function does not go through ``__call__``.

        Args:
            x, residual: (..., features), with the same shape and dtype.

        Returns:
            Two tensors with the shape and dtype of x.
        """
        return add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"

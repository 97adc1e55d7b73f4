"""A linear layer as a module."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shoestring.gemm.linear import library_sum, linear


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` that computes ``shoestring.linear``. Its state_dict is the same.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        library: as in ``shoestring.linear``.

    Example:
        >>> layer = shoestring.nn.Linear(64, 32)
        >>> layer(torch.randn(2, 16, 64), residual=torch.randn(2, 16, 32)).shape
        torch.Size([2, 16, 32])
        >>> layer.load_state_dict(torch.nn.Linear(64, 32).state_dict())
        <All keys matched successfully>
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        library: Collection[str] = (),
    ) -> None:
        library_sum("nn.Linear", library)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.library = tuple(library)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute ``input @ weight.T + bias + residual``; see ``shoestring.linear``."""
        return linear(input, self.weight, self.bias, residual=residual, library=self.library)

    def extra_repr(self) -> str:
        more = f", library={self.library}" if self.library else ""
        return super().extra_repr() + more

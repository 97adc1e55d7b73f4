"""The gated MLP of Llama's and Gemma's layers."""

import torch
from torch import Tensor, nn

from shoestring.adapters.together import adapted_swiglu, forward_together
from shoestring.layers.geglu import geglu
from shoestring.layers.swiglu import swiglu

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class GatedMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``: SwiGLU or GeGLU in one pass each way (arXiv 2002.05202).

    Its state_dict has transformers' names, ``gate_proj``, ``up_proj``, ``down_proj``: Llama's, Qwen's, Gemma's.
    Backward keeps the two projections and their product; where ``down_proj`` is frozen, with a low-rank adapter, not
    SwiGLU's product. ``gate_proj`` and ``up_proj``, frozen, with adapters or quantised, are one ``lora_linear_group``.

    Args:
        features: of the input and of the result.
        hidden_features: between the projections.
        activation: "silu" (Llama), "gelu_tanh" (Gemma) or "gelu", which is exact.
        bias: whether the projections have one.
        device, dtype: of the parameters, which begin as ``nn.Linear``'s.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"nn.GatedMLP: activation: expected 'silu', 'gelu' or 'gelu_tanh', received {activation!r}"
            )
        self.features, self.activation = features, activation
        self.gate_proj = nn.Linear(features, hidden_features, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(features, hidden_features, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_features, features, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., features); the result has its shape, and the dtype of the projections.

        Raises:
            ValueError: an x of other features.
        """
        if x.shape[-1:] != (self.features,):
            raise ValueError(f"nn.GatedMLP: x: expected (..., {self.features}), received {tuple(x.shape)}")
        if self.activation == "silu":
            y = adapted_swiglu(x, self.gate_proj, self.up_proj, self.down_proj)
            if y is not None:
                return y
        gate, up = forward_together(x, [self.gate_proj, self.up_proj])
        if self.activation == "silu":
            product = swiglu(gate, up)
        else:
            product = geglu(gate, up, "tanh" if self.activation == "gelu_tanh" else "none")
        result: Tensor = self.down_proj(product)
        return result

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

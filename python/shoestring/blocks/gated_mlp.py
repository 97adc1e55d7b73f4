"""Define a module of the gated MLP that Llama and Gemma use."""

import torch
from torch import Tensor, nn

from shoestring.adapters.together import adapted_swiglu, forward_together, project
from shoestring.layers.geglu import geglu
from shoestring.layers.swiglu import swiglu

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class GatedMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, a SwiGLU or GeGLU block (arXiv 2002.05202).

    Its state_dict has the names of transformers (Llama, Qwen, Gemma): ``gate_proj``, ``up_proj`` and
    ``down_proj``.

    The outputs of ``gate_proj`` and ``up_proj`` and the input of ``down_proj`` are saved for backward. In
    SwiGLU, the input of ``down_proj`` is not saved if ``down_proj`` is frozen and has a low-rank adapter. If
    ``gate_proj`` and ``up_proj`` are frozen and have adapters or quantised weights, one call of
    ``lora_linear_group`` computes the outputs of both. This package computes dense projections on CPUs where its
    products are faster, else PyTorch does.

    Args:
        features: size of the last dimension of input and output.
        hidden_features: output features of ``gate_proj`` and ``up_proj``.
        activation: "silu" (Llama), "gelu_tanh" (Gemma) or "gelu" (exact).
        bias: whether the projections have a bias.
        device, dtype: device and dtype of the parameters, which are initialised like those of ``nn.Linear``.

    Raises:
        ValueError: the activation is unknown.

    Example:
        >>> mlp = shoestring.nn.GatedMLP(64, 192)
        >>> mlp(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
        >>> sorted(mlp.state_dict())
        ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight']
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
        """Compute the gated MLP.

        Args:
            x: (..., features).

        Returns:
            The shape of x, in the dtype of the projections.

        Raises:
            ValueError: the last dimension of x is not features.
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
        return project(product, self.down_proj)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

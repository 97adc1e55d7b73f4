"""The stacked MLPs of experts as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.experts.moe_experts import run_stacks

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


class Experts(nn.Module):
    """The gated MLPs of experts, by :func:`moe_experts`. The names of parameters are those of transformers.

    Adapters of ``shoestring.lora`` on the stacks (``target_parameters``) become the ``lora`` of :func:`moe_experts`.

    Args:
        experts: number of experts.
        features: size of the last dimension of input and output.
        hidden: hidden features of an expert.
        activation, limit, interleaved, transposed: as for :func:`moe_experts`.
        bias: whether experts have biases.
        device, dtype: device and dtype of the parameters. Each expert is initialised like layers of ``nn.Linear``.

    Attributes:
        gate_up_proj: (experts, 2 hidden, features), or (experts, features, 2 hidden) with ``transposed``.
        down_proj: (experts, features, hidden), or (experts, hidden, features) with ``transposed``.
        gate_up_proj_bias: (experts, 2 hidden); None without ``bias``.
        down_proj_bias: (experts, features); None without ``bias``.

    Raises:
        ValueError: the activation is unknown, or the limit is not above 0.

    Example:
        >>> router, experts = shoestring.nn.Router(16, 8, 2), shoestring.nn.Experts(8, 16, 24)
        >>> x = torch.randn(4, 10, 16)
        >>> route = router(x)
        >>> experts(x, route.index, route.weight).shape
        torch.Size([4, 10, 16])
        >>> sorted(experts.state_dict())
        ['down_proj', 'gate_up_proj']
    """

    _shoestring_reads_stacks = True  # see core/stacks.py
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        features: int,
        hidden: int,
        *,
        activation: str = "silu",
        limit: float | None = None,
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"nn.Experts: activation: expected one of {names}, received {activation!r}")
        if limit is not None and not limit > 0:
            raise ValueError(f"nn.Experts: limit: expected None or a number above 0, received {limit}")
        self.experts, self.features, self.hidden = experts, features, hidden
        self.activation, self.limit, self.interleaved = activation, limit, interleaved
        self.is_transposed = transposed  # the name of transformers, which the adapters read

        def stack(rows: int, columns: int) -> nn.Parameter:
            shape = (experts, columns, rows) if transposed else (experts, rows, columns)
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        def biases(size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(experts, size, device=device, dtype=dtype)) if bias else None

        self.gate_up_proj = stack(2 * hidden, features)
        self.down_proj = stack(features, hidden)
        self.register_parameter("gate_up_proj_bias", biases(2 * hidden))
        self.register_parameter("down_proj_bias", biases(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for size, names in (
            (self.features, ("gate_up_proj", "gate_up_proj_bias")),
            (self.hidden, ("down_proj", "down_proj_bias")),
        ):
            for name in names:
                if (parameter := self._parameters[name]) is not None:
                    nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Return for each token the weighted sum of the MLPs of its experts.

        Args:
            x: (..., features).
            index: (..., top_k), int64: the experts of each token, as :class:`Router` returns them; -1 is no expert.
            weight: (..., top_k): the weights of the experts.

        Returns:
            The shape of x, in its dtype, or in that of autocast.
        """
        return run_stacks(
            x,
            index,
            weight,
            self.gate_up_proj,
            self.down_proj,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            activation=self.activation,
            limit=self.limit,
            interleaved=self.interleaved,
            transposed=self.is_transposed,
        )

    def extra_repr(self) -> str:
        return f"{self.experts}, {self.features}, {self.hidden}, activation={self.activation!r}"

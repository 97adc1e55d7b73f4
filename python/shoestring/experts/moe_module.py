"""A mixture of experts as a module: the router, the experts, and a shared MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.blocks.gated_mlp import GatedMLP
from shoestring.core.stacks import EXCHANGE
from shoestring.experts.experts_module import Experts
from shoestring.experts.moe_route import MoeRoute
from shoestring.experts.router_module import Router


class MoE(nn.Module):
    """A mixture of experts: for each token the weighted sum of ``top_k`` of the experts, and of a shared MLP.

    Args:
        features: size of the last dimension of input and output.
        hidden: hidden features of an expert.
        experts: number of experts.
        top_k: number of experts of a token.
        shared_hidden: hidden features of the MLP ``shared`` that all tokens have, a :class:`GatedMLP`; 0 for none.
        score, renormalize, groups, top_groups, scale, bias_rate: options of :class:`Router`.
        activation, limit, bias, interleaved, transposed: options of :class:`Experts`. ``shared`` has the same
            ``activation`` and ``bias``.
        device, dtype: device and dtype of the parameters.

    Raises:
        RuntimeError, ValueError: an option does not fit, as for :class:`Router` and :class:`Experts`, or ``shared`` does
            not have the activation or limit of the experts.

    Example:
        >>> moe = shoestring.nn.MoE(16, 24, experts=8, top_k=2, shared_hidden=24, renormalize=True)
        >>> y, route = moe(torch.randn(4, 10, 16))
        >>> y.shape
        torch.Size([4, 10, 16])
        >>> (y.square().mean() + 0.01 * route.balance).backward()
    """

    shared: GatedMLP | None

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared_hidden: int = 0,
        score: str = "softmax",
        renormalize: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        bias_rate: float = 0.0,
        activation: str = "silu",
        limit: float | None = None,
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shared_hidden > 0 and limit is not None:
            raise ValueError(
                f"nn.MoE: limit: expected None with a shared MLP, which clamps nothing, received {limit}; add a MLP of "
                "your own instead"
            )
        self.router = Router(
            features,
            experts,
            top_k,
            score=score,
            renormalize=renormalize,
            groups=groups,
            top_groups=top_groups,
            scale=scale,
            bias_rate=bias_rate,
            device=device,
            dtype=dtype,
        )
        self.experts = Experts(
            experts,
            features,
            hidden,
            activation=activation,
            limit=limit,
            bias=bias,
            interleaved=interleaved,
            transposed=transposed,
            device=device,
            dtype=dtype,
        )
        shared = None
        if shared_hidden > 0:
            shared = GatedMLP(
                features, shared_hidden, activation=activation, bias=bias, device=device, dtype=dtype
            )
        self.register_module("shared", shared)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, MoeRoute]:
        """Compute the mixture of experts.

        Args:
            x: (..., features).
            mask: (...), bool: True for the tokens that count. Others have no expert; the shared MLP computes them, too.

        Returns:
            The output, with the shape of x, and the route, whose ``balance`` and ``z`` may be added to the loss.
        """
        route = self.router(x, mask)
        exchange = getattr(self.experts, EXCHANGE, None)
        if exchange is None or self.shared is None:
            y = self.experts(x, route.index, route.weight)
            return (y if self.shared is None else y + self.shared(x)), route
        sent = exchange.send(x, route.index, route.weight)
        shared = self.shared(x)  # while the tokens travel
        return exchange.receive(sent) + shared, route

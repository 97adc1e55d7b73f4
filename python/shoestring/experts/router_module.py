"""The router of a mixture of experts as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.experts.moe_route import MoeRoute, moe_route


class Router(nn.Module):
    """A linear layer without bias whose outputs choose ``top_k`` experts for each token, by :func:`moe_route`.

    The logits are computed in fp32 (fp64 for fp64), also under autocast and for 16-bit weights.

    With ``bias_rate``, a bias of the choice balances the experts without a loss (arXiv 2408.15664). In training mode,
    ``counts`` sums the tokens of each expert over the micro-batches; recomputed forwards do not count. Call
    :meth:`update_bias` after each step of the optimizer.

    Args:
        features: size of the last dimension of the input.
        experts: number of experts.
        top_k, score, renormalize, groups, top_groups, scale: as for :func:`moe_route`.
        bias_rate: the change of the bias in a step, such as 0.001; 0 for no bias.
        device, dtype: device and dtype of the weight, which is initialised like that of ``nn.Linear``.

    Attributes:
        weight: (experts, features), a parameter.
        bias: (experts), a buffer that stays in fp32; None without ``bias_rate``.
        counts: (experts), an int64 buffer; None without ``bias_rate``.

    Raises:
        RuntimeError: an option does not fit, as for :func:`moe_route`.
        ValueError: ``bias_rate`` is negative.

    Example:
        >>> router = shoestring.nn.Router(16, 8, 2, renormalize=True, bias_rate=0.001)
        >>> route = router(torch.randn(4, 10, 16))
        >>> route.index.shape, router.counts.sum()
        (torch.Size([4, 10, 2]), tensor(80))
        >>> router.update_bias()
        >>> router.counts.sum()
        tensor(0)
    """

    bias: Tensor | None
    counts: Tensor | None

    def __init__(
        self,
        features: int,
        experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        bias_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not bias_rate >= 0:
            raise ValueError(f"nn.Router: bias_rate: expected a number of at least 0, received {bias_rate}")
        self.features, self.experts, self.top_k, self.score = features, experts, top_k, score
        self.renormalize, self.groups, self.top_groups = renormalize, groups, top_groups
        self.scale, self.bias_rate = scale, bias_rate
        self._route(torch.empty(0, experts, device="cpu"), None)  # raises if an option does not fit
        self.weight = nn.Parameter(torch.empty(experts, features, device=device, dtype=dtype))
        has_bias = bias_rate > 0
        bias = torch.zeros(experts, device=device, dtype=torch.float32) if has_bias else None
        self.register_buffer("bias", bias)
        counts = torch.zeros(experts, device=device, dtype=torch.int64) if has_bias else None
        self.register_buffer("counts", counts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> MoeRoute:
        """Choose the experts of each token.

        Args:
            x: (..., features), any floating-point dtype.
            mask: (...), bool: True for the tokens that count; see :func:`moe_route`.

        Returns:
            index and weight (..., top_k), counts, and the losses ``balance`` and ``z``. The weights are fp32, or fp64 if
            x or the weight is.
        """
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        route = self._route(logits, mask, self.bias)
        if self.counts is not None and self.training and not is_recomputed():
            self.counts += route.counts
        return route

    def _route(self, logits: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> MoeRoute:
        return moe_route(
            logits,
            self.top_k,
            score=self.score,
            bias=bias,
            renormalize=self.renormalize,
            groups=self.groups,
            top_groups=self.top_groups,
            scale=self.scale,
            mask=mask,
        )

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Raise the bias of experts with fewer tokens than the mean, lower that of others, and set the counts to 0.

        The bias changes by ``bias_rate`` and then moves to the mean 0. Call this after the step of the optimizer.
        Without ``bias_rate``, nothing happens.

        Args:
            group: the processes whose counts are summed. None: all processes, if ``torch.distributed`` has been
                initialised.
        """
        if self.bias is None or self.counts is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.counts, group=group)
        fewer = (self.counts.sum() - self.experts * self.counts).sign()  # the sign of mean - counts
        self.bias += self.bias_rate * fewer
        self.bias -= self.bias.mean()
        self.counts.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.bias
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)  # 16 bits would lose steps of bias_rate
        return result

    def extra_repr(self) -> str:
        return f"{self.features}, {self.experts}, top_k={self.top_k}, score={self.score!r}"


def is_recomputed() -> bool:
    """Return whether a backward pass runs this forward, as checkpoints do."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

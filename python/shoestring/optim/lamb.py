"""LAMB with state in few bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.lamb_op import lamb_
from shoestring.optim.whole import WholeTensorOptimizer


class LAMB(WholeTensorOptimizer):
    """LAMB (arXiv 1904.00962), for large batches, with moments in 8 bits: 2.03 bytes a parameter instead of 8.

    AdamW's update, and with it the decay, is made as long as the weights, parameter by parameter: lr is a share of
    their norm.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 520, 296 for 4-bit state, 1024 for bf16 and 2048 for fp32, and 512 more with ``weights="remainder"``.
    During a step, at most 12 bytes an element of one parameter at a time.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: the weights' share in what is made as long as they are.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, parameter or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler and ``grad_norm`` holds here as well.
    """

    _moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
    _operator = staticmethod(lamb_)
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return dict(beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"])

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        self._expect(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)", betas
        )
        for name in ("eps", "weight_decay"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])

"""Lion with state in few bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.lion_op import lion_


class Lion(LowMemoryOptimizer):
    """Lion (arXiv 2302.06675) whose moment is kept in 8 bits: 1.02 bytes a parameter instead of 4.

    A weight moves by lr, up or down: ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``; then
    ``m = beta2 m + (1 - beta2) g``. Learning rates are 3 to 10 times below AdamW's, weight decay as much above.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 260, 160 for 4-bit state, 512 for bf16 and 1024 for fp32, and 512 more with ``weights="remainder"``.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: the share of the moment in the update, and in the new moment, each in [0, 1).
        weight_decay: decoupled, applied before the update.
        **options: as for ``AdamW``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``step, exp_avg, exp_avg_scale``, and ``load_state_dict`` reads bitsandbytes' ``Lion8bit``.
    """

    _moments = (Moment("exp_avg", signed=True),)
    _operator = staticmethod(lion_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return dict(beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas, decay = group["betas"], group["weight_decay"]
        self._expect(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", "two numbers in [0, 1)", betas
        )
        self._expect(decay >= 0, "weight_decay", "a number of at least 0", decay)

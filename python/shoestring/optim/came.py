"""CAME, with its mean of updates in few bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.came_op import came_
from shoestring.optim.whole import WholeTensorOptimizer, factored


class CAME(WholeTensorOptimizer):
    """CAME (arXiv 2307.02047): Adafactor whose mean of updates moves weights less where updates differ from it.

    What the authors' implementation does: without corrections for the means' start at zero, and without the division
    by the instability for parameters of less than two dimensions.

    Memory: 8 bytes for each row and column of a matrix (of each of a batch of them in more dimensions), 4 for each
    element of other parameters, and 4 for each parameter; and what ``Lion`` has, 1.02 bytes an element in 8 bits.
    During a step, 8 bytes an element of one parameter at a time.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element, as for ``AdamW``. The first updates are some ten times
            longer than AdamW's, until the instability has been measured over several steps: warm up.
        eps: added to squared gradients, and to the squared distances of updates from their mean; above 0.
        clip_threshold: the largest root mean square of an update before the mean, above 0.
        betas: decay of the mean of updates, above 0, of squared gradients, and of squared distances; below 1.
        weight_decay: decoupled, applied before the update.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, parameter or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler and ``grad_norm`` holds here as well; ``state[p]`` holds
    ``step, exp_avg``, its scale, and in fp32 ``exp_avg_sq_row, exp_avg_sq_col, exp_avg_sq, exp_avg_res_row,
    exp_avg_res_col``, those that the parameter does not need being empty.
    """

    _moments = (Moment("exp_avg", signed=True),)
    _operator = staticmethod(came_)
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        own = dict(lr=lr, eps=eps, clip_threshold=clip_threshold, betas=betas, weight_decay=weight_decay)
        super().__init__(params, own, **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        own = {name: group[name] for name in ("clip_threshold", "weight_decay")}
        own |= {f"beta{i}": beta for i, beta in enumerate(group["betas"], 1)}
        return own | {f"eps{i}": eps for i, eps in enumerate(group["eps"], 1)}

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas, eps, threshold = group["betas"], group["eps"], group["clip_threshold"]
        good = len(betas) == 3 and all(0 <= b < 1 for b in betas) and betas[0] > 0
        self._expect(good, "betas", "three numbers in [0, 1), the first above 0", betas)
        self._expect(len(eps) == 2 and min(eps) > 0, "eps", "two numbers above 0", eps)
        self._expect(threshold > 0, "clip_threshold", "a number above 0", threshold)
        self._expect(
            group["weight_decay"] >= 0, "weight_decay", "a number of at least 0", group["weight_decay"]
        )

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        row, col, full = factored(tuple(param.shape))
        own = dict(exp_avg_sq_row=row, exp_avg_sq_col=col, exp_avg_sq=full)
        return own | dict(exp_avg_res_row=row, exp_avg_res_col=col)

"""AdEMAMix with state in few bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.ademamix_op import ademamix_
from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions


class AdEMAMix(LowMemoryOptimizer):
    """AdEMAMix (arXiv 2409.03137) with moments in 8 bits, the slow one in 16: 4.03 bytes a parameter instead of 12.

    AdamW with a second, slow mean of gradients, ``alpha`` times which is added to the first in the update.

    Memory: ``sum(ceil(n / 256) * 1032 + 4)`` bytes over the parameters that have had a gradient, n being their sizes;
    in place of 1032, 808 for 4-bit state, 1536 for bf16 and 3072 for fp32, and 512 more with ``weights="remainder"``. The
    slow mean moves by less in a step than codes are apart; where other moments are codes, it is bf16 and rounded
    stochastically, which is right in the mean.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``.
        betas: decay of the running means of the gradient, of its square, and of the gradient again, slowly; each in
            [0, 1).
        alpha: of the slow mean in the update.
        t_alpha: steps in which alpha rises from 0, evenly; None: it is there at once.
        t_beta3: steps in which the slow mean's decay rises from the first to the third beta, so that the time after
            which half is forgotten grows evenly; None: it is there at once.
        eps: added to the root of the second moment.
        weight_decay: decoupled, applied before the update.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``exp_avg_slow``, which never has a scale, beside the entries of ``AdamW``.
    """

    _moments = (
        Moment("exp_avg", signed=True),
        Moment("exp_avg_slow", signed=True, long=True),
        Moment("exp_avg_sq", signed=False),
    )
    _operator = staticmethod(ademamix_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        own = dict(lr=lr, betas=betas, alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3)
        super().__init__(params, own | dict(eps=eps, weight_decay=weight_decay), **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("alpha", "t_alpha", "t_beta3", "eps", "weight_decay")
        return dict(zip(("beta1", "beta2", "beta3"), group["betas"], strict=True)) | {
            n: group[n] for n in names
        }

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        self._expect(
            len(betas) == 3 and all(0 <= b < 1 for b in betas), "betas", "three numbers in [0, 1)", betas
        )
        for name in ("alpha", "eps", "weight_decay"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])
        for name in ("t_alpha", "t_beta3"):
            steps = group[name]
            good = steps is None or (isinstance(steps, int) and steps > 0)
            self._expect(good, name, "None or a number of steps", steps)
        rises = group["t_beta3"] is None or 0 < betas[0] <= betas[2]
        self._expect(rises, "betas", "a third of at least the first, and that above 0, with t_beta3", betas)

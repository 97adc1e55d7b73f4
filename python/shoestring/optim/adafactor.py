"""Adafactor, with an optional mean of updates in few bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.adafactor_op import adafactor_
from shoestring.optim.arena import Moment
from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.whole import WholeTensorOptimizer, factored

MEAN = (Moment("exp_avg", signed=True),)


class Adafactor(WholeTensorOptimizer):
    """Adafactor (arXiv 1804.04235): of matrices it keeps the second moment's means over rows and columns alone.

    What ``torch.optim.Adafactor`` does; with ``beta1`` above 0, a running mean of the clipped updates takes their
    place, and is kept in 8 bits.

    Memory: 4 bytes for each row, column and parameter (``4 (rows + columns + 1)`` for a matrix, for each of a batch of
    them in more dimensions; ``4 (n + 1)`` for vectors); with beta1, what ``Lion`` has in addition, 1.02 bytes an
    element. During a step, 4 bytes an element of one parameter at a time, and 4 more for a gradient that is not fp32 or
    is scaled, or with ``weights="remainder"``.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: the largest relative step; a number, or a tensor of one element, as for ``AdamW``.
        beta2_decay: beta2 is ``1 - step ** beta2_decay``; at most 0.
        eps: the least root of the second moment (None: the distance from 1 to the next larger number of the dtype), and
            the least root mean square of the weights, which relative steps are relative to.
        d: the largest root mean square of an update, at least 1.
        weight_decay: decoupled, applied before the update.
        beta1: the share of the mean of updates in the new mean, [0, 1); above 0 in all groups or in none.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, parameter or loaded state that does not fit; nothing has changed then.

    What ``AdamW`` says of groups, state dicts, GradScaler and ``grad_norm`` holds here as well; ``state[p]`` holds
    ``step, row_var, col_var, variance`` in fp32, those that the parameter does not need being empty, and with beta1
    ``exp_avg`` and its scale.
    """

    _operator = staticmethod(adafactor_)
    _splits = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float = 0.0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        self._moments = MEAN if beta1 else ()
        own = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, beta1=beta1)
        super().__init__(params, own, **options)

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("beta1", "beta2_decay", "d", "weight_decay")
        eps1, eps2 = group["eps"]
        return {name: group[name] for name in names} | dict(eps1=eps1, eps2=eps2)

    def _check_rule(self, group: dict[str, Any]) -> None:
        eps, beta1 = group["eps"], group["beta1"]
        good = len(eps) == 2 and (eps[0] is None or eps[0] >= 0) and eps[1] >= 0
        self._expect(good, "eps", "None or a number of at least 0, and one of at least 0", eps)
        self._expect(group["beta2_decay"] <= 0, "beta2_decay", "a number of at most 0", group["beta2_decay"])
        self._expect(group["d"] >= 1, "d", "a number of at least 1", group["d"])
        self._expect(
            group["weight_decay"] >= 0, "weight_decay", "a number of at least 0", group["weight_decay"]
        )
        self._expect(0 <= beta1 < 1, "beta1", "a number in [0, 1)", beta1)
        self._expect(
            (beta1 > 0) == bool(self._moments), "beta1", "a number above 0 in all groups or in none", beta1
        )

    def _extra(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return dict(zip(("row_var", "col_var", "variance"), factored(tuple(param.shape)), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._moments = state.get("_moments", self.__dict__.get("_moments", ()))
        super().__setstate__(state)

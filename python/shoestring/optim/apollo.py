"""APOLLO: learning rates of whole channels, from the state of a random projection."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.optim.adamw import AdamW
from shoestring.optim.low_rank import LowRankOptimizer, Shapes
from shoestring.optim.projections import fp32_rows, is_left, mix, normal, project

NORM_GROWTH = (
    1.01  # the most that the norm of an update grows by from step to step; the paper's (Fira's) limit
)


class APOLLO(LowRankOptimizer):
    """APOLLO (arXiv 2412.05270) around an optimizer like Adam: step sizes by channel, with state of a low rank.

    The gradient G (m, n) of a matrix, m <= n, becomes R = P G, (r, n), with random P. The base optimizer steps a
    virtual parameter with R, at a learning rate of 1; its update U (r, n) tells how much G is scaled, in every column
    j: ``W -= lr * scale * G * norm(U[:, j]) / norm(R[:, j])``, the norm of which grows by 1 % a step at most. Where n <
    m, rows are the channels. P is made from a seed whenever it is needed, and from a new one every ``update_proj_gap``
    steps.

    Memory, for a matrix (m, n), l being max(m, n): 4 bytes and the base's state of ``l * r`` parameters, which for
    8-bit AdamW is ``ceil(l * r / 256) * 520 + 4`` bytes. A step takes 8 l r bytes for a time, for all matrices
    together, and P.

    Args:
        params: as for ``GaLore``; the parameters that step as by the base alone are the same.
        base_optimizer: the class: AdamW, or one whose update has a size of its own in the same way.
        rank: r; a group may have its own, as of the four that follow, and None for no projection.
        update_proj_gap: steps between random projections.
        scale: what the update of a projected parameter is multiplied by. (The authors' code takes the square of it.)
        scale_type: "channel", or "tensor": one factor, from the norms of all of U and R.
        seed: of the projections, on which results depend (and on the kind of device), and the base's.
        max_grad_norm, options: as for ``GaLore``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.
        TypeError: an option that the base optimizer does not have.

    What ``GaLore`` says of 16-bit weights, schedulers, state dicts and GradScaler holds here as well. ``state[p]``
    holds ``norm`` (fp32, of the last update before lr and scale), ``projection_age`` (steps) and ``seed`` beside the
    base's entries, of the virtual parameter's shape. Updates are bias-corrected as the base's are.
    """

    _virtual_options = {"weight_decay": 0.0, "lr": 1.0}

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] = AdamW,
        *,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        seed: int = 0,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        defaults = dict(
            rank=rank, update_proj_gap=update_proj_gap, scale=scale, scale_type=scale_type, seed=seed
        )
        super().__init__(params, base_optimizer, defaults, options, max_grad_norm)

    def _check_own(self, group: dict[str, Any]) -> None:
        kind = group["scale_type"]
        self._expect(kind in ("channel", "tensor"), "scale_type", '"channel" or "tensor"', kind)

    def _own_shapes(self, param: Tensor, group: dict[str, Any]) -> Shapes:
        return {"norm": (torch.float32, ()), "projection_age": None, "seed": None}

    def _down(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        rank, entry = group["rank"], self.state[param]
        if not entry:
            entry.update(norm=torch.zeros((), device=grad.device), projection_age=0)
            entry["seed"] = mix(group["seed"], self._position(param))
        elif entry["projection_age"] >= group["update_proj_gap"]:
            entry.update(projection_age=0, seed=mix(entry["seed"]))
        entry["projection_age"] += 1
        rows, columns = grad.shape
        basis = normal((min(rows, columns), rank), entry["seed"], grad.device) / rank**0.5
        return project(grad, basis, is_left(rows, columns, group))

    def _up(
        self, param: Tensor, low: Tensor, low_grad: Tensor, grad_factor: Tensor | float, group: dict[str, Any]
    ) -> None:
        assert param.grad is not None
        grad, entry = param.grad.flatten(1), self.state[param]
        height, width = grad.shape
        along = 0 if is_left(height, width, group) else 1  # what a channel's norm sums over
        dim = along if group["scale_type"] == "channel" else None
        norms = [
            torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
            for x in (low, low_grad, grad)
        ]
        factor = torch.where(norms[1] == 0, 0.0, norms[0] / norms[1]) * grad_factor
        size = torch.linalg.vector_norm(factor * norms[2])
        limit = torch.where(entry["norm"] == 0, 1.0, (NORM_GROWTH * entry["norm"] / size).clamp(max=1.0))
        entry["norm"].copy_(size * limit)
        sign = 1.0 if group.get("maximize") else -1.0
        factor *= limit * sign * group["scale"] * self._lr(param, group)
        for rows, weight in fp32_rows(param):
            self._decay(weight, param, group)
            weight.addcmul_(grad[rows].float(), factor[rows] if dim == 1 else factor)


class APOLLOMini(APOLLO):
    """APOLLO-Mini (arXiv 2412.05270): ``APOLLO`` with rank 1, and one factor for each tensor; next to no state.

    Memory, for a matrix with l rows or columns, whichever are more: ``ceil(l / 256) * 520 + 8`` bytes for 8-bit AdamW.
    Its ``scale`` is the root of 128. Arguments, errors and the rest are those of ``APOLLO``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] = AdamW,
        *,
        rank: int | None = 1,
        scale: float = 128**0.5,
        scale_type: str = "tensor",
        **options: Any,
    ) -> None:
        super().__init__(params, base_optimizer, rank=rank, scale=scale, scale_type=scale_type, **options)

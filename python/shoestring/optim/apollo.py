"""APOLLO: one learning rate per channel, from the optimizer state of a randomly projected gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.optim.adamw import AdamW
from shoestring.optim.low_rank import LowRankOptimizer, Shapes
from shoestring.optim.projections import fp32_rows, is_left, mix, normal, project

# APOLLO lets the norm of an update grow by at most this factor per step, as its paper does.
NORM_GROWTH = 1.01


class APOLLO(LowRankOptimizer):
    """APOLLO (arXiv 2412.05270) around an Adam-like optimizer: step sizes per channel, with low-rank state.

    The gradient G (m, n) of a matrix, m <= n, becomes R = P G, (r, n), with a random P. The base optimizer
    steps a virtual parameter, a stand-in of R's shape, with R as its gradient and a learning rate of 1. The
    base optimizer's update U (r, n) determines the factor of G in every column j: ``W -= lr * scale * G *
    norm(U[:, j]) / norm(R[:, j])``. The norm of this update grows by at most 1 % per step. The channels are
    the columns; if n < m, they are the rows. P is generated from a seed whenever it is needed, and from a new
    seed every ``update_proj_gap`` steps.

    Memory, for a matrix (m, n) with l = max(m, n): 4 bytes, and the base optimizer's state of ``l * r``
    elements, which for 8-bit AdamW is ``ceil(l * r / 256) * 520 + 4`` bytes. During a step, all matrices
    together take another 8 l r bytes. P exists only while it is used.

    Args:
        params: as for ``GaLore``. The base optimizer alone steps the parameters that ``GaLore`` does not
            project.
        base_optimizer: the class of the base optimizer: AdamW, or another whose update does not change if all
            gradients are multiplied by a constant.
        rank: r, or None for no projection. A group may override rank, update_proj_gap, scale, scale_type and
            seed.
        update_proj_gap: the number of steps between random projections.
        scale: factor of the update of a projected parameter. (The authors' code takes the square of it.)
        scale_type: "channel" for one factor per channel. "tensor" for one factor per matrix, which is norm(U)
            / norm(R).
        seed: seed of the projections and of the base optimizer. Results depend on it and on the kind of
            device.
        max_grad_norm, options: as for ``GaLore``.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.
        TypeError: the base optimizer lacks an option.

    16-bit weights, schedulers, state dicts and GradScaler work as documented for ``GaLore``. ``state[p]``
    holds ``norm`` (fp32, the norm of the last update before lr and scale), ``projection_age`` (in steps) and
    ``seed``. ``state[p]`` also holds the base optimizer's entries in the virtual parameter's shape. Updates
    have the bias correction of the base optimizer.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = shoestring.optim.APOLLO(model.parameters(), shoestring.optim.AdamW, rank=4, lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].shape
        torch.Size([4, 64])
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
        # The norm of a channel is taken over this dimension of the gradient.
        along = 0 if is_left(height, width, group) else 1
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
    """APOLLO-Mini (arXiv 2412.05270): ``APOLLO`` with rank 1 and one factor per tensor, with almost no state.

    Memory, for a matrix whose longer side is l: ``ceil(l / 256) * 520 + 8`` bytes with 8-bit AdamW as the
    base optimizer. ``scale`` defaults to the square root of 128. Arguments, errors and behaviour are
    otherwise those of ``APOLLO``.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = shoestring.optim.APOLLOMini(model.parameters(), lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].shape
        torch.Size([1, 64])
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

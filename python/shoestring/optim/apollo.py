"""APOLLO: one learning rate per channel, from the optimizer state of a randomly projected gradient."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from shoestring.optim.adamw import AdamW
from shoestring.optim.low_rank import LowRankOptimizer
from shoestring.optim.virtual import LowRankMethod


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

    _method = LowRankMethod(
        "APOLLO", ("scale_type", '"channel" or "tensor"'), "norm", {"weight_decay": 0.0, "lr": 1.0}
    )

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

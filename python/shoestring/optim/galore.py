"""GaLore: the state of any optimizer, in the subspace of the gradient's leading singular vectors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoestring.optim.adamw import AdamW
from shoestring.optim.low_rank import LowRankOptimizer, Shapes
from shoestring.optim.projections import fp32_rows, is_left, leading_vectors, mix, normal, project


class GaLore(LowRankOptimizer):
    """GaLore (arXiv 2403.03507) around another optimizer: full-parameter training with the state of a low rank.

    The gradient G (m, n) of a matrix becomes R = P^T G, the columns of P (m, r) being G's leading left singular vectors
    of some step before; the base optimizer steps a virtual parameter (r, n) with R, and ``scale * P`` times its update
    moves the matrix. Where n < m, P (n, r) is on the right: R = G P, (m, r). Every ``update_proj_gap`` steps P is made
    again, by a randomised subspace iteration that captures what an SVD would at a fraction of its time; the base's
    state goes on in the new basis, whose signs follow the old one's. ::

        optimizer = GaLore([{"params": matrices}, {"params": others, "rank": None}], AdamW, rank=128, lr=1e-3)

    The arguments are in the order of every other optimizer, so that a framework that is given a class and options makes
    it as it makes those.

    Memory, for a matrix (m, n), s being min(m, n) and l max(m, n): ``s * r`` elements of the parameter's dtype, and the
    base's state of ``l * r`` parameters: ``ceil(l * r / 256) * 520 + 4`` bytes for 8-bit AdamW. A step takes 8 l r
    bytes for a time, for all matrices together, and for one matrix at a time what a product needs (16-bit ones: 64
    MiB).

    Args:
        params: parameters, named parameters or groups; projected ones are fp32, bf16 or fp16. A weight of more than two
            dimensions, such as a convolution's, is the matrix (first, all others). Vectors, and matrices with
            fewer than ``rank`` rows (columns, for a projection on the right), step as by the base alone.
        base_optimizer: the class; its update must not depend on the weights but for decoupled weight decay (no L2
            penalty, trust ratio, parameter scale or averaging of weights).
        rank: r; a group may have its own, as of the four that follow, and None for no projection. Embeddings and
            heads are usually left out.
        update_proj_gap: steps between projections.
        scale: what the update of a projected parameter is multiplied by.
        projection: "auto" (the smaller side), "left" (rows) or "right" (columns).
        seed: of the random start of the iteration, on which results depend (and on the kind of device), and the base's.
        max_grad_norm: gradients are clipped to this norm, over the full gradients of all parameters, within the step:
            ``.grad`` stays as it is. The attribute may be changed between steps; ``grad_norm`` is the last norm.
        options: of the base optimizer: lr, betas, weight_decay, state, ... ``weight_decay`` decays the whole weight.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.
        TypeError: an option that the base optimizer does not have.

    16-bit weights: decay and update are added in fp32, and rounded once, to nearest (``weights="plain"``). A gradient
    that is zero or not finite gives no projection: the last one, or a random one, stays until the next step. Parameter
    groups, schedulers, hooks, closures and state dicts work as in ``torch.optim``; a GradScaler unscales, and skips, by
    itself. A new projection waits for the device; a step can not be captured in a CUDA graph. DTensor parameters are
    refused: a projection is of a whole matrix.

    ``state[p]`` holds ``projection`` (s, r), ``projection_age`` (steps) and ``seed`` (of the next one) beside the
    base's entries, of the virtual parameter's shape.
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] = AdamW,
        *,
        rank: int | None = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        projection: str = "auto",
        seed: int = 0,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        defaults = dict(
            rank=rank, update_proj_gap=update_proj_gap, scale=scale, projection=projection, seed=seed
        )
        super().__init__(params, base_optimizer, defaults, options, max_grad_norm)

    def _check_own(self, group: dict[str, Any]) -> None:
        side = group["projection"]
        self._expect(side in ("auto", "left", "right"), "projection", '"auto", "left" or "right"', side)

    def _own_shapes(self, param: Tensor, group: dict[str, Any]) -> Shapes:
        left = is_left(len(param), param.numel() // len(param), group)
        side = len(param) if left else param.numel() // len(param)
        return {"projection": (param.dtype, (side, group["rank"])), "projection_age": None, "seed": None}

    def _down(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        rows, columns = grad.shape
        left = is_left(rows, columns, group)
        entry = self.state[param]
        if not entry or entry["projection_age"] >= group["update_proj_gap"]:
            self._renew(param, grad if left else grad.mT, group)
        entry["projection_age"] += 1
        return project(grad, entry["projection"].float(), left)

    def _renew(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """A projection for the columns of a gradient; one that says nothing is waited out."""
        entry, old = self.state[param], self.state[param].get("projection")
        seed = entry.get("seed", mix(group["seed"], self._position(param)))
        largest = float(torch.linalg.vector_norm(grad, torch.inf))
        if 0 < largest < torch.inf:
            basis = leading_vectors(grad.float(), group["rank"], seed)
            if old is not None:  # first moments do not flip with the arbitrary sign of a singular vector
                basis *= torch.where((basis * old).sum(0) < 0, -1.0, 1.0)
            age = 0
        elif old is None:
            basis = torch.linalg.qr(normal((len(grad), group["rank"]), seed, grad.device)).Q
            age = group["update_proj_gap"]
        else:
            return
        entry.update(projection=basis.to(param.dtype), projection_age=age, seed=mix(seed))

    def _up(
        self, param: Tensor, low: Tensor, low_grad: Tensor, grad_factor: Tensor | float, group: dict[str, Any]
    ) -> None:
        left = is_left(len(param), param.numel() // len(param), group)
        basis = self.state[param]["projection"].float()
        for rows, weight in fp32_rows(param):
            self._decay(weight, param, group)
            if left:
                weight.addmm_(basis[rows], low, alpha=group["scale"])
            else:
                weight.addmm_(low[rows], basis.mT, alpha=group["scale"])

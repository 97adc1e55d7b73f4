"""GaLore: optimizer state in the subspace of the gradient's leading singular vectors."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from shoestring.optim.adamw import AdamW
from shoestring.optim.low_rank import LowRankOptimizer
from shoestring.optim.virtual import LowRankMethod


class GaLore(LowRankOptimizer):
    """GaLore (arXiv 2403.03507) around another optimizer: full-parameter training with low-rank state.

    The gradient G (m, n) of a matrix becomes R = P^T G. The columns of P (m, r) are the leading left singular
    vectors of G at some earlier step. The base optimizer steps a virtual parameter, a stand-in of shape (r,
    n), with R as its gradient. ``scale * P`` times the base optimizer's update is added to the matrix. If n <
    m, P (n, r) multiplies from the right: R = G P, (m, r). Every ``update_proj_gap`` steps P is computed
    again by a randomised subspace iteration, which is much faster than an SVD and about as accurate. The base
    optimizer's state is kept when P changes, so the signs of the new columns are aligned with the old ones::

        optimizer = GaLore([{"params": matrices}, {"params": others, "rank": None}], AdamW, rank=128, lr=1e-3)

    The constructor takes the parameters and then options, like every other optimizer. A framework that builds
    an optimizer from a class and options can therefore use it unchanged.

    Memory, for a matrix (m, n) with s = min(m, n) and l = max(m, n): ``s * r`` elements of the parameter's
    dtype, and the base optimizer's state of ``l * r`` elements, which for 8-bit AdamW is ``ceil(l * r / 256)
    * 520 + 4`` bytes. During a step, all matrices together take 8 l r bytes. One matrix at a time also takes
    the temporaries of a product (64 MiB for 16-bit matrices).

    Args:
        params: parameters, named parameters or parameter groups; projected parameters are fp32, bf16 or fp16.
            A weight with more than two dimensions, such as a convolution's, is treated as the matrix (first
            dimension, all others). Vectors are not projected; nor are matrices with fewer than ``rank`` rows
            (columns, for a projection on the right). The base optimizer steps them directly.
        base_optimizer: the class of the base optimizer. Its update must not depend on the weights, except for
            decoupled weight decay: no L2 penalty, trust ratio, parameter scaling or averaging of weights.
        rank: r, or None for no projection. A group may override rank, update_proj_gap, scale, projection and
            seed. Embeddings and output heads are usually not projected.
        update_proj_gap: the number of steps between projections.
        scale: factor of the update of a projected parameter.
        projection: the dimension of the matrix that P reduces: "auto" (the smaller one), "left" (the rows) or
            "right" (the columns).
        seed: seed of the random start of the subspace iteration, and of the base optimizer. Results depend on
            it and on the kind of device.
        max_grad_norm: clip gradients to this norm, taken over the full gradients of all parameters. The step
            clips internally and ``.grad`` does not change. The attribute may be changed between steps; the
            attribute ``grad_norm`` is the gradient norm of the last step before clipping.
        options: options of the base optimizer: lr, betas, weight_decay, state_format, ... ``weight_decay``
            applies to the whole weight.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.
        TypeError: the base optimizer lacks an option.

    For 16-bit weights, decay and update are added in fp32 and rounded once, to nearest
    (``weight_rounding="nearest"``). No projection is computed from a gradient that is zero or not finite. The
    previous projection, or at first a random one, is used for that step. Parameter groups, schedulers, hooks,
    closures and state dicts work as in ``torch.optim``. With a GradScaler, the step itself unscales
    gradients, and is skipped if they are not finite. Computing a projection waits for the device, so a step
    cannot be captured in a CUDA graph. DTensors that are split by rows, as by ``fully_shard``, are stepped as
    whole matrices: each process has the projections and the low-rank state, and one of them computes a new
    projection.

    ``state[p]`` holds ``projection`` (s, r), ``projection_age`` (in steps) and ``seed`` (of the next
    projection). It also holds the base optimizer's entries in the virtual parameter's shape.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = shoestring.optim.GaLore(model.parameters(), shoestring.optim.AdamW, rank=4, lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["projection"].shape
        torch.Size([32, 4])
    """

    _method = LowRankMethod(
        "GaLore", ("projection", '"auto", "left" or "right"'), "projection", {"weight_decay": 0.0}
    )

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

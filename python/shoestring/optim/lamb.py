"""LAMB whose moments are stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.whole import WholeTensorOptimizer


class LAMB(WholeTensorOptimizer):
    """LAMB (arXiv 1904.00962), for large batches, with 8-bit moments: 2.03 bytes per parameter instead of 8.

    Algorithm 2 of the paper, with the identity for phi: weight decay is added to Adam's update u, and the sum is
    rescaled to the norm of the parameter p: ``r = u + weight_decay p``; ``p = p - lr |p| / |r| r``. If ``|p|`` or
    ``|r|`` is 0, the ratio counts as 1. A NaN or infinite element of a gradient spoils the whole parameter.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 520 bytes per block of 256 elements become 296 with 4-bit
    state, 1024 with bf16 and 2048 with fp32. ``weight_rounding="remainder"`` adds 512. A step takes at
    most 12 bytes of temporary memory per element of one parameter at a time.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: the update includes ``weight_decay`` times the weights before it is rescaled.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a parameter or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler and ``grad_norm`` work as documented for ``AdamW``.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.LAMB(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        8324
    """

    _core_class = "LAMB"

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

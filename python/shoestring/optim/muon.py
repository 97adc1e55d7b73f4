"""Muon whose momentum buffer is stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptions
from shoestring.optim.convert import exported
from shoestring.optim.whole import WholeTensorOptimizer

COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(WholeTensorOptimizer):
    """Muon (Jordan, 2024) with 8-bit momentum: 1.02 bytes per parameter instead of 4.

    The rule is that of ``torch.optim.Muon``. First the mean m of gradients g becomes ``m = momentum m + (1 -
    momentum) g``. Newton-Schulz steps bring the singular values of m near 1. With Nesterov's momentum, they
    do so for ``momentum m + (1 - momentum) g`` instead. The resulting matrix O moves the weight: ``p = p (1 - lr
    weight_decay) - lr scale O``. Use Muon for
    the matrices of hidden layers, and ``shoestring.optim.AdamW`` for embeddings, heads, biases and norms.
    Products are bf16 on CUDA and on CPUs with hardware bf16 products, else fp32.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 260 bytes per block of 256 elements become 160 with 4-bit
    state, 512 with bf16 and 1024 with fp32. ``weight_rounding="remainder"`` adds 512. A step takes at
    most 16 bytes of temporary memory per element of one parameter at a time (8 with bf16 products).

    Args:
        params: matrices, as parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        weight_decay: decoupled weight decay, applied before the update.
        momentum: the weight of the old mean of gradients in the new mean, in [0, 1).
        nesterov: use Nesterov's momentum.
        ns_coefficients: a, b and c. A Newton-Schulz step replaces X by ``a X + b (X X^T) X + c (X X^T)^2 X``.
        eps: m is divided by its norm, or by eps if the norm is smaller, before the Newton-Schulz steps.
        ns_steps: the number of Newton-Schulz steps, 1 to 99.
        adjust_lr_fn: sets the factor of lr. "original" or None is sqrt(max(1, rows / columns)).
            "match_rms_adamw" is 0.2 sqrt(max(rows, columns)), for which the lr and weight_decay of AdamW are
            suitable.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a parameter or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler and ``grad_norm`` work as documented for ``AdamW``. ``state[p]``
    holds ``step, momentum_buffer, momentum_buffer_scale``. ``load_state_dict`` also reads the state dicts of
    ``torch.optim.Muon``.

    Example:
        >>> model = torch.nn.Linear(64, 64, bias=False)
        >>> optimizer = shoestring.optim.Muon(model.parameters(), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        4164
    """

    _core_class = "Muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        defaults |= dict(nesterov=nesterov, ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps)
        super().__init__(params, defaults | dict(adjust_lr_fn=adjust_lr_fn), **options)

    def _check_param(self, index: int, param: Tensor) -> None:
        super()._check_param(index, param)
        if param.dim() != 2:
            raise ValueError(
                f"{self._name}: params[{index}]: expected a matrix, received shape {tuple(param.shape)}; use "
                "shoestring.optim.AdamW for parameters of other shapes"
            )

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state dict in the format of ``torch.optim.Muon.load_state_dict``.

        The momentum buffers are fp32 and have the parameters' shapes.
        """
        return exported(self)

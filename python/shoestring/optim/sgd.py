"""SGD whose momentum buffer is stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.convert import exported


class SGD(LowMemoryOptimizer):
    """SGD with an 8-bit momentum buffer: 1.02 bytes per parameter instead of 4.

    The rule is that of ``torch.optim.SGD``. First the gradient of the parameter p becomes ``g = g + weight_decay
    p``. In a parameter's first step the buffer becomes g; later it becomes ``momentum buffer + (1 - dampening)
    g``. Then ``p = p - lr buffer``, or with Nesterov's momentum ``p = p - lr (g + momentum buffer)``. For SGD
    without momentum, which has no state, use ``torch.optim.SGD``.

    Memory: ``sum(ceil(n / 256) * 260 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 260 bytes per block of 256 elements become 160 with 4-bit
    state, 512 with bf16 and 1024 with fp32. ``weight_rounding="remainder"`` adds 512.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element as for ``AdamW``.
        momentum: the weight of the old buffer in the new buffer, above 0.
        dampening: the gradient is multiplied by ``1 - dampening`` before it is added to the buffer, except in
            a parameter's first step.
        weight_decay: an L2 penalty, added to the gradient after clipping.
        nesterov: use Nesterov's momentum; requires ``dampening=0``.
        **options: options of every optimizer here, see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.

    Parameter groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` work as documented for ``AdamW``.
    ``state[p]`` holds ``step, momentum_buffer, momentum_buffer_scale``. ``load_state_dict`` also reads the
    state dicts of ``torch.optim.SGD``.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        4164
    """

    _core_class = "SGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, defaults, **options)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state dict in the format of ``torch.optim.SGD.load_state_dict``.

        The momentum buffers are fp32 and have the parameters' shapes. PyTorch casts the buffers to the
        parameters' dtype when it loads them.
        """
        return exported(self)

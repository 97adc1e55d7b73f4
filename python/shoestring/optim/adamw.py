"""AdamW whose moments are stored quantised."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.convert import exported


class AdamW(LowMemoryOptimizer):
    """AdamW (arXiv 1711.05101) with 8-bit moments: 2.03 bytes per parameter instead of 8.

    A drop-in replacement for ``torch.optim.AdamW``: parameter groups, schedulers, hooks, closures and state
    dicts work in the same way. State of any size is quantised in blocks of 256 elements, each with an fp32
    scale (arXiv 2110.02861). The codes are those of bitsandbytes' 8-bit optimizers, except that a second
    moment is coded as zero only if it is exactly zero. A step computes in fp32 with the moments before they
    are quantised, in one pass over all tensors of a group. Results do not depend on the number of threads.

    Memory: ``sum(ceil(n / 256) * 520 + 4)`` bytes, summed over the parameters that have had a gradient; n is
    the number of elements of a parameter. The 520 bytes per block of 256 elements become 296 with 4-bit
    state, 1024 with bf16 and 2048 with fp32. ``weight_rounding="remainder"`` adds 512. The state of a
    parameter is allocated when it first has a gradient.

    Args:
        params: parameters, named parameters or parameter groups; fp32, bf16 or fp16.
        lr: learning rate: a number, or a tensor of one element. If the tensor is on the parameters' device,
            each step reads it there. A schedule may then change it in place (``fill_``) between the replays
            of a CUDA graph.
        betas: decay of the running means of the gradient and of its square, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, applied before the update.
        **options: options of every optimizer here, see ``LowMemoryOptions``. Among them are ``state_format``,
            ``weight_rounding``, ``max_grad_norm`` and ``step_in_backward``.

    Attributes:
        grad_norm: with ``max_grad_norm``, the gradient norm of the last step before clipping, without the
            scale of a GradScaler. It is an fp32 scalar on the gradients' device, computed without a host
            synchronisation. ``max_grad_norm=torch.inf`` measures the norm and never clips.

    Raises:
        ValueError: an option, a dtype or a loaded state does not fit. Nothing has changed then.
        TypeError: an option of ``torch.optim.AdamW`` is not supported (amsgrad, foreach, fused, capturable,
            differentiable). ``False`` is accepted, and so is ``None`` for foreach and fused.

    Under ``torch.amp.GradScaler`` the step itself divides the gradients by the scale, and skips if they are
    not finite. The host does not wait for the decision whether to skip. On a GPU a step does not synchronise
    and can be captured in a CUDA graph. The state has to exist before the capture, so take one step outside
    the graph first.

    ``state[p]`` holds ``step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale`` (no scales with fp32 or
    bf16 state). The entries are views into memory that the group shares. The next step copies entries that
    have been replaced, and starts anew a parameter whose entries have been deleted.
    ``load_state_dict`` also reads the state dicts of ``torch.optim.AdamW``, of bitsandbytes' ``AdamW8bit``
    and of its variants.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> sum(tensor.nbytes for tensor in optimizer.state[model.weight].values())
        8324
    """

    _core_class = "AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state dict in the format of ``torch.optim.AdamW.load_state_dict``.

        The moments are fp32 and have the parameters' shapes. PyTorch casts the moments to the parameters'
        dtype when it loads them.
        """
        return exported(self)

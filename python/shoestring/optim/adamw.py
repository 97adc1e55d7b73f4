"""AdamW whose moments are stored quantised."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.convert import exported
from shoestring.optim.state_layout import Moment
from shoestring.optim.step_arguments import StepArguments


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **arguments: Unpack[StepArguments],
) -> None:
    """Take one AdamW step in place, in one pass over all parameters that have a gradient.

    The state of all parameters lies in flat arenas, in the order of ``params``. The state of each parameter
    starts at a multiple of 256 elements. ``shoestring.optim.AdamW`` manages the arenas. The update uses the
    new moments before they are quantised. A NaN or infinite gradient spoils its own weight, as in PyTorch.
    With 8-bit state it spoils all 256 elements of its block, but no other block.

    Args:
        params: fp32, bf16 or fp16 tensors of any shape, updated in place. The arithmetic is fp32.
        grads: one gradient for each parameter, of its shape, in fp32, bf16 or fp16. None leaves the parameter
            and its step count unchanged.
        step: (number of parameters), fp32: the steps that each parameter has taken; incremented in place.
        exp_avg, exp_avg_sq: fp32 or bf16 values, (elements of the arena); or uint8 codes, one 8-bit or two
            4-bit codes per byte.
        exp_avg_scale, exp_avg_sq_scale: fp32 scales of the codes, or None without codes. The shape is
            (elements of the arena / 256) for 8-bit codes, and that of ``quantize_state_4bit`` for 4-bit
            codes.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``. The decay is applied before the
            update.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit. No tensor has changed then.

    On a GPU, unless the state is fp32, the square root and the reciprocal of the update use hardware
    approximations. Their error is one or two units in the last place, and eps is at least 1.1e-19.

    Example:
        >>> param, grad, step = torch.ones(1000), torch.ones(1000), torch.zeros(1)
        >>> mean, variance = torch.zeros(1024), torch.zeros(1024)  # 1000, rounded up to a multiple of 256
        >>> rule = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
        >>> shoestring.ops.adamw_([param], [grad], step, mean, None, variance, None, **rule)
        >>> torch.allclose(param, torch.tensor(0.9))
        True
    """
    torch.ops.shoestring.adamw_(
        params,
        grads,
        step,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        **arguments,
    )


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

    _moments = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
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
        return exported(self, self._moments)
